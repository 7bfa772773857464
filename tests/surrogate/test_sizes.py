"""Sizes are solved on equations alone: no module, no tensor."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]

from surrogate.size_constraints import SizeTrace
from surrogate.sizes import evaluate, scale_sizes

d, h, f, k = sympy.symbols("d h f k", integer=True, positive=True)
DIVIDES = (sympy.Eq(sympy.Mod(d, h), 0),)


def trace(width: int, heads: int, name: str = "n_head") -> SizeTrace:
    """A width `d` in `heads` heads and an MLP four times as wide, on its own symbol."""
    return SizeTrace(
        tensors={"qkv": (3 * d, d), "mlp": (f, d)},
        seeds=frozenset({d, f}),
        attributes={("attention", name): (h,)},
        sizes={d: width, h: heads, f: 4 * width},
        equations=DIVIDES,
    )


@pytest.mark.parametrize(
    ("width", "heads", "ratio", "expected"),
    [
        (768, 12, 1 / 4, (192, 3, 768)),  # heads of 64 throughout
        (768, 12, 1 / 8, (128, 2, 384)),  # 1.5 heads are 2
        (128, 4, 1 / 8, (32, 1, 64)),  # no fewer than one
        (96, 6, 1 / 3, (32, 2, 128)),  # 96 * (1/3) is 32, not 33
    ],
)
def test_whole_heads(width: int, heads: int, ratio: float, expected: tuple[int, ...]) -> None:
    values = scale_sizes(trace(width, heads), ratio)
    assert (values[d], values[h], values[f]) == expected


def test_the_size_of_a_head_stays() -> None:
    assert scale_sizes(trace(64, 16, name="head_dim"), 1 / 4)[h] == 16


def test_of_heads_and_other_parts_of_one_size_the_heads_become_fewer() -> None:
    parts = SizeTrace(
        tensors={"in": (h * f, d), "out": (d, h * f)},
        seeds=frozenset({d, h, f}),
        attributes={("layer", "n_head"): (h,), ("layer", "states"): (f,)},
        sizes={d: 64, h: 4, f: 8},
        equations=(),
    )
    assert scale_sizes(parts, 1 / 4) == {d: 16, h: 1, f: 8}


@pytest.mark.parametrize("equation", [sympy.Eq(f, k // 2), sympy.Eq(k // 2, f)])
def test_a_size_that_is_computed_from_that_of_a_head_stays_with_it(equation: sympy.Eq) -> None:
    rotated = SizeTrace(
        tensors={"qkv": (h * k, d), "frequencies": (f,)},
        seeds=frozenset({d, h, k, f}),
        attributes={("layer", "n_head"): (h,), ("layer", "head_dim"): (k,)},
        sizes={d: 80, h: 4, k: 20, f: 10},
        equations=(equation, sympy.Eq(sympy.Mod(d, f), 0)),
    )
    assert scale_sizes(rotated, 1 / 4) == {d: 20, h: 1, k: 20, f: 10}


def test_equations_that_rounding_breaks_are_met_at_the_next_multiple() -> None:
    third = SizeTrace({"w": (d, f)}, frozenset({d, f}), {}, {d: 100, f: 50}, (sympy.Eq(d, 2 * f),))
    values = scale_sizes(third, 0.13)
    assert values[d] == 2 * values[f] >= 13


def test_evaluate() -> None:
    assert evaluate((d * 49, sympy.Integer(3)), {d: 2}) == (98, 3)


def test_nothing_to_scale() -> None:
    with pytest.raises(ValueError, match="no width can be scaled"):
        scale_sizes(SizeTrace({"w": (sympy.Integer(4),)}, frozenset(), {}, {}, ()), 1 / 2)


def test_no_sizes_that_fit() -> None:
    odd = SizeTrace({"w": (d, f)}, frozenset({d, f}), {}, {d: 96, f: 95}, (sympy.Eq(d, f + 1),))
    told = r"width_ratio=0.5 leaves no sizes that fit together \(unmet: Eq\(d, f \+ 1\)\)"
    with pytest.raises(ValueError, match=told):
        scale_sizes(odd, 1 / 2)


def test_sizes_that_do_not_fit_stay_and_leave_others_their_rounding() -> None:
    apart = SizeTrace({"w": (d,), "v": (f,)}, frozenset({d, f}), {}, {d: 96, f: 20}, (sympy.Eq(d, 96),))
    assert scale_sizes(apart, 1 / 4) == {d: 96, f: 5}


def test_a_width_with_a_value_that_an_equation_fixes_stays_alone() -> None:
    """As the channels behind a pixel shuffle: it does not make the others multiples of its own size."""
    fixed = SizeTrace({"w": (d, f)}, frozenset({d, f}), {}, {d: 64, f: 12}, (sympy.Eq(f // 4, 3),))
    assert scale_sizes(fixed, 1 / 4) == {d: 16, f: 12}
    with pytest.raises(ValueError, match="no width can be scaled"):
        scale_sizes(SizeTrace({"w": (d,)}, frozenset({d}), {}, {d: 96}, (sympy.Eq(d, 96),)), 1 / 2)
