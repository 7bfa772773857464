from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from surrogate import make_surrogate, shrink
from surrogate.roles_and_multipliers import width_plan
from surrogate.widths import ParamWidth, compare_shapes, refuse_single_units, shapes_of
from tests.surrogate.models import ZOO, Config, mlp, transformer


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


def bottleneck(config: Config, width_ratio: float) -> nn.Module:
    width = int(64 * width_ratio)
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, width // 8), nn.Linear(width // 8, 3))


def test_a_width_of_one_unit_is_refused() -> None:
    told = r"'1.weight' is \(1, 8\) in the surrogate and \(8, 64\) .* 8 falls to one unit, .* \(a width ratio of 0.25 "
    with pytest.raises(ValueError, match=told):
        make_surrogate(bottleneck, {}, 1 / 8)
    make_surrogate(bottleneck, {}, 1 / 4)
    assert shapes_of(shrink(bottleneck({}, 1.0), 1 / 8, torch.zeros(2, 8)))["1.weight"] == (8, 8)


def rounded_down(config: Config, width_ratio: float) -> nn.Module:
    width = int(6 * width_ratio)
    return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 3))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_width_of_no_unit_is_refused() -> None:
    told = r"'0.weight' is \(0, 8\) in the surrogate and \(6, 8\) in the target: a width falls to no unit"
    with pytest.raises(ValueError, match=told):
        make_surrogate(rounded_down, {}, 1 / 8)


def grouped(config: Config, width_ratio: float) -> nn.Module:
    """Of a fixed number of groups, and a norm of as many groups as there are channels to eight."""
    width = int(64 * width_ratio)
    return nn.Sequential(nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 3, groups=8), nn.GroupNorm(width // 8, width))


def test_groups_may_be_few_but_no_group_one_channel_wide() -> None:
    narrow = make_surrogate(grouped, {}, 1 / 4)
    assert narrow.get_parameter("1.weight").shape == (16, 2, 3, 3)
    with pytest.raises(ValueError, match=r"'1.weight' is \(8, 1, 3, 3\)"):
        make_surrogate(grouped, {}, 1 / 8)


def test_the_advice_for_several_widths_of_one_unit_leaves_two_in_the_smallest() -> None:
    params = {"weight": ParamWidth((64, 16), (1, 1))}
    with pytest.raises(ValueError, match=r"a width of 64 falls to one unit, .* \(a width ratio of 0.125 leaves two"):
        refuse_single_units(params, nn.Module(), nn.Module())
    refuse_single_units({"weight": ParamWidth((64, 1), (16, 1))}, nn.Module(), nn.Module())


class HeadScales(nn.Module):
    """An attention layer with a scale for each head, as Swin has."""

    def __init__(self, width: int, **told: int) -> None:
        super().__init__()
        heads = width // 16
        vars(self).update(told or {"num_heads": heads})
        self.scale = nn.Parameter(torch.ones(heads, 1, 1))
        self.bias = nn.Embedding(5, heads)
        self.out = nn.Linear(width, width)


def test_one_head_of_the_same_size_is_no_single_unit() -> None:
    narrow = make_surrogate(lambda config, ratio: HeadScales(int(64 * ratio)), {}, 1 / 4)
    assert narrow.get_parameter("scale").shape == (1, 1, 1)
    assert width_plan(make_surrogate(transformer, {}, 1 / 8)).attention == {}


@pytest.mark.parametrize("told", [lambda heads: {"groups": heads}, lambda heads: {"num_heads": 1}])
def test_a_unit_is_no_head_unless_the_model_counts_it_as_one(told: Callable[[int], dict[str, int]]) -> None:
    with pytest.raises(ValueError, match=r"'scale' is \(1, 1, 1\) .* a width of 4 falls to one unit"):
        make_surrogate(lambda config, ratio: HeadScales(int(64 * ratio), **told(int(4 * ratio))), {}, 1 / 4)


def test_a_depthwise_convolution_has_no_width_to_lose() -> None:
    model_fn, config, _ = ZOO["cnn"]
    assert make_surrogate(model_fn, config, 1 / 4).get_parameter("3.weight").shape == (16, 1, 3, 3)
