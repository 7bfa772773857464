from __future__ import annotations

import copy
import pickle

import pytest

from surrogate import make_surrogate
from surrogate.multipliers import width_plan
from surrogate.widths import ParamWidth, compare_shapes
from tests.surrogate.models import mlp


def test_a_dimension_that_differs_is_a_width() -> None:
    param = compare_shapes({"w": (512, 64), "b": (512,)}, {"w": (128, 64), "b": (128,)})["w"]
    assert [dim.isinf() for dim in param.infshape()] == [True, False]
    assert param.width_mult == 128 / 512
    assert not param.is_matrix


def test_width_mult_is_the_actual_ratio_after_rounding() -> None:
    assert ParamWidth((100, 100), (13, 13)).width_mult == 0.13


def test_the_plan_is_plain_values() -> None:
    plan = width_plan(make_surrogate(mlp, {}, 1 / 4))
    assert copy.deepcopy(plan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_another_number_of_dimensions() -> None:
    with pytest.raises(ValueError, match="'w' has 2 dimensions in the target and 1 in the surrogate"):
        compare_shapes({"w": (8, 8)}, {"w": (4,)})
