"""How far the results of a member fused and alone may lie apart, against tolerances by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.check.equal_within_rounding import MemberResults, differences, explained


def results(value: Any = 0.0, *, kind: str = "values", counted: bool = False, **attributes: Any) -> MemberResults:
    """Results of which one, "x", is a value, a gradient or a buffer; the largest gradient and value are 1."""
    tensors = {name: {"other " + name: torch.tensor(1.0)} for name in ("values", "gradients", "buffers")}
    tensors[kind]["x"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return MemberResults(**tensors, attributes=attributes, counted=frozenset({"x"} if counted else ()))


HALF_OF_THE_DIGITS = 2.0**-11.5
"""The root of the rounding of float32."""


@pytest.mark.parametrize("kind", ["values", "gradients", "buffers"])
@pytest.mark.parametrize(
    ("alone", "together", "eps", "differs"),
    [
        (1.0, 1 + 0.9 * HALF_OF_THE_DIGITS, 0.0, False),
        (1.0, 1 + 1.1 * HALF_OF_THE_DIGITS, 0.0, True),
        (8.0, 8 - 7.0 * HALF_OF_THE_DIGITS, 0.0, False),  # of the largest element
        ([8.0, 1.0], [8.0, 1 + 7.0 * HALF_OF_THE_DIGITS], 0.0, False),
        ([8.0, 1.0], [8.0, 1 + 9.0 * HALF_OF_THE_DIGITS], 0.0, True),
        (1.0, 1.009, 1e-4, False),
        (1.0, 1.011, 1e-4, True),
        (7, 7, 1e-4, False),
        (7, 8, 1e-4, True),
        (True, False, 1e-4, True),
        (1j, 1.1j, 1e-4, True),
        (1j, 1.009j, 1e-4, False),
        (math.nan, math.inf, 0.0, False),
        (math.nan, 1.0, 0.0, True),
        (1.0, math.nan, 0.0, True),
        ([1.0, 1.0], 1.0, 0.0, True),
        ([], [], 0.0, False),
    ],
)
def test_half_of_the_digits_are_equal(kind: str, alone: Any, together: Any, eps: float, differs: bool) -> None:
    found = differences(results(together, kind=kind), results(alone, kind=kind), eps, 0.0)
    assert found == ["x"] * differs


@pytest.mark.parametrize(("kind", "differs"), [("values", True), ("buffers", True), ("gradients", False)])
def test_a_gradient_that_is_zero_but_for_rounding_is_compared_with_the_largest_one(kind: str, differs: bool) -> None:
    near, far = results(0.009 * HALF_OF_THE_DIGITS, kind=kind), results(0.011 * HALF_OF_THE_DIGITS, kind=kind)
    assert differences(near, results(kind=kind), 0.0, 0.0) == ["x"] * differs
    assert differences(far, results(kind=kind), 0.0, 0.0) == ["x"]


@pytest.mark.parametrize(
    ("alone", "together", "differs"),
    [(0.5, 0.54, False), (0.5, 0.56, True), (100, 102, False), (100, 97, True), (1, 3, False)],
)
def test_a_result_without_gradient_may_count_two_examples_otherwise(alone: Any, together: Any, differs: bool) -> None:
    """A mean moves by the share of two examples, and a number of examples by two."""
    own, ours = results(alone, counted=True), results(together, counted=True)
    assert differences(ours, own, 0.0, 0.1) == ["x"] * differs
    assert differences(ours, results(alone), 0.0, 0.1) == ["x"]


@pytest.mark.parametrize(
    ("alone", "together", "differs"),
    [
        (1.0, 1.0009, False),
        (1.0, 1.002, True),
        (-1.0, -1.002, True),
        (math.inf, math.inf, False),
        (math.nan, math.nan, False),
        (math.nan, 1.0, True),
        (1, True, True),
        ("a", "a", False),
        ("a", "b", True),
    ],
)
def test_attributes(alone: Any, together: Any, differs: bool) -> None:
    assert differences(results(a=together), results(a=alone), 1.0, 1.0) == ["a"] * differs
    assert differences(results(), results(a=alone), 1.0, 1.0) == ["a"]


def test_what_moves_as_much_by_rounded_weights_is_explained() -> None:
    alone, tries = results(1.0, a=1.0), [results(1.25, a=2.0), results(0.5, a=2.0)]
    assert explained("x", results(3.0), alone, tries)
    assert not explained("x", results(3.125), alone, tries)
    assert not explained("a", results(1.0, a=2.0), alone, tries)
