"""Choose narrower sizes that satisfy every equation of a `SizeTrace`, by plain arithmetic without tensors."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import FloorDiv

from surrogate.resize import NarrowSizes
from surrogate.size_constraints import SizeTrace

_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Widths are rounded up to a multiple of one of these, tried in turn until all equations hold."""


def narrow_sizes(trace: SizeTrace, width_ratio: float, lists: Collection[int] = ()) -> NarrowSizes:
    """Choose the sizes of the narrow copy of the module that was traced.

    A size stays if `find_counts` or `find_third_widths` returns it. A width also stays if only one of its units would
    be left. `lists` are the lengths of the model's module lists.
    """
    counts = find_counts(trace, lists)
    kept = {
        symbol: f"{trace.sizes[symbol]} of {name} stays, as {reason}"
        for found, reason in (
            (counts, "no layer reads it: it seems to count experts or scores"),
            (find_third_widths(trace, counts), "muP has rules for two widths of a parameter"),
        )
        for symbol, name in found.items()
    }
    values = scale_sizes(trace, width_ratio, kept)
    if small := _find_single_units(trace, values):
        kept |= {s: f"{trace.sizes[s]} of {name} stays, as one unit would be left" for s, name in small.items()}
        with contextlib.suppress(ValueError):  # if no sizes are found, a later check refuses the single units
            values = scale_sizes(trace, width_ratio, kept)
    told = list(kept.values())
    return NarrowSizes(
        {name: evaluate(sizes, values) for name, sizes in trace.tensors.items()},
        {key: (evaluate(sizes, trace.sizes), evaluate(sizes, values)) for key, sizes in trace.attributes.items()},
        (*dict.fromkeys(told), *trace.kept),
    )


def scale_sizes(trace: SizeTrace, width_ratio: float, keep: Collection[sympy.Symbol] = ()) -> dict[sympy.Symbol, int]:
    """Choose the value of every symbol in the narrow copy. Symbols in `keep` stay as they are.

    Widths are multiplied by the ratio and rounded up. If heads divide a width, their number shrinks and their size
    stays, so such a width is rounded up to whole heads. Sizes that equations connect are chosen together. They stay if
    no rounding satisfies these equations.

    Raises:
        ValueError: if nothing can be scaled, or if rounding satisfies the equations of no connected sizes.
    """
    roles = _roles(trace)
    widths, counts = roles.widths - {*keep}, roles.counts - {*keep}
    widths -= _pinned(trace, width_ratio, widths)
    if not widths and not counts:
        raise ValueError(_nothing_to_scale(trace))
    units = {width: _head_size(trace, roles, width) for width in widths}
    while True:
        values = _scaled_sizes(trace, width_ratio, units, counts, roles.named_heads)
        # If a width stays, its number of heads stays, because fewer heads would have to be larger.
        stuck = {count for count in counts if values[count] < trace.sizes[count] and not _shrinks(trace, count, values)}
        if not stuck:
            return values
        counts -= stuck


def _pinned(trace: SizeTrace, width_ratio: float, widths: Collection[sympy.Symbol]) -> set[sympy.Symbol]:
    """Find those of `widths` that stay because of an equation in which they are the only symbol.

    An example is a number of channels that a pixel shuffle turns into pixels. These widths are found first, so that
    other widths in the same equations are not rounded up further because of them.
    """
    found = set()
    for width in widths:
        full, own = trace.sizes[width], [e for e in trace.equations if e.free_symbols == {width}]
        smaller = {size for m in _MULTIPLES if (size := _scaled(full, width_ratio, m)) < full}
        if own and not any(all(_holds(equation, {width: size}) for equation in own) for size in smaller):
            found.add(width)
    return found


def _scaled_sizes(
    trace: SizeTrace,
    width_ratio: float,
    units: Mapping[sympy.Symbol, int],
    counts: Collection[sympy.Symbol],
    named_heads: Collection[sympy.Symbol],
) -> dict[sympy.Symbol, int]:
    values, unmet = dict(trace.sizes), []
    for symbols, equations in _tied_together(trace, sorted({*units, *counts}, key=str)):
        heads = {count: _scaled(trace.sizes[count], width_ratio, 1) for count in symbols & {*counts}}
        # Try each multiple with fewer heads, then with all heads, because a model that averages its heads needs all.
        for multiple, stay in itertools.product(_MULTIPLES, (frozenset(), named_heads)):
            sizes = {width: (trace.sizes[width], math.lcm(units[width], multiple)) for width in symbols & units.keys()}
            scaled = {width: min(full, _scaled(full, width_ratio, unit)) for width, (full, unit) in sizes.items()}
            found = {s: size for s, size in {**scaled, **heads}.items() if s not in stay}
            if all(_holds(equation, {**trace.sizes, **found}) for equation in equations):
                values |= found
                break
        else:
            unmet += [str(e) for e in equations if not _holds(e, {**trace.sizes, **scaled, **heads})]
    if unmet and values == trace.sizes:
        raise ValueError(
            f"width_ratio={width_ratio:g} leaves no sizes that fit together (unmet: {'; '.join(unmet[:3])}); "
            "try another ratio, or give the model a `width_ratio` argument and use make_surrogate"
        )
    return values


def _tied_together(
    trace: SizeTrace, symbols: Collection[sympy.Symbol]
) -> list[tuple[set[sympy.Symbol], list[sympy.Basic]]]:
    """Split symbols into groups so that no equation connects two groups; return each group with its equations."""
    groups: list[tuple[set[sympy.Symbol], list[sympy.Basic]]] = [({symbol}, []) for symbol in symbols]
    for equation in trace.equations:
        own = [group for group in groups if not group[0].isdisjoint(equation.free_symbols)]
        if own:
            joined = {s for of, _ in own for s in of}, [e for _, of in own for e in of] + [equation]
            groups = [group for group in groups if group not in own] + [joined]
    return groups


def _shrinks(trace: SizeTrace, count: sympy.Symbol, values: Mapping[sympy.Symbol, int]) -> bool:
    """Return whether a size that the number of heads `count` divides is smaller in `values` than in the module."""
    tied = {s for equation in trace.equations if count in equation.free_symbols for s in equation.free_symbols}
    within = any(count in size.free_symbols for sizes in trace.tensors.values() for size in sizes)
    return within or any(values[s] < trace.sizes[s] for s in tied - {count})


def _nothing_to_scale(trace: SizeTrace) -> str:
    found = f" ({'; '.join(trace.kept[:3])})" if trace.kept else ""
    return (
        "no width can be scaled: every size is fixed by the input, the output or a number in the forward "
        f"pass{found}; give the model a `width_ratio` argument and use make_surrogate"
    )


def find_counts(trace: SizeTrace, lists: Collection[int]) -> dict[sympy.Symbol, str]:
    """Find sizes that seem to be counts rather than widths, such as the number of a gate's experts. Counts must stay.

    A width differs from a count: another layer reads it, or two layers write it and their outputs are multiplied.

    `lists` are the lengths of the model's module lists. Return a map from each count to a parameter that has it.
    """
    matrices = {name: sizes for name, sizes in trace.tensors.items() if len(sizes) > 1}
    roles = _roles(trace)
    tied = {s for equation in trace.equations for s in equation.free_symbols}
    found = {}
    for symbol in sorted(trace.seeds - roles.counts - roles.head_sizes - tied, key=str):
        holders = [name for name, sizes in matrices.items() for dim in sizes if symbol in dim.free_symbols]
        read = any(symbol in dim.free_symbols for sizes in matrices.values() for dim in sizes[1:])
        # A gate and a parameter that holds the matrices of all experts have the number of experts as a common size.
        stacked = not trace.stacks.isdisjoint(holders) and not trace.stacks.issuperset(holders)
        if holders and (len(holders) == 1 or (not read and (trace.sizes[symbol] in lists or stacked))):
            found[symbol] = min(holders, key=lambda name: len(matrices[name]))
    return found


def find_third_widths(trace: SizeTrace, counts: Collection[sympy.Symbol]) -> dict[sympy.Symbol, str]:
    """Find sizes that no layer has, in parameters with more than two widths, such as the modes of a Fourier operator.

    Return a map from each size to the first parameter that has it.
    """
    layers = [sizes for name, sizes in trace.tensors.items() if name not in trace.stacks]
    of_layers = {s for sizes in layers for size in sizes for s in size.free_symbols}
    found: dict[sympy.Symbol, str] = {}
    for name in sorted(trace.stacks):
        own = [size.free_symbols for size in trace.tensors[name] if size.free_symbols & (trace.seeds - {*counts})]
        if len(own) > 2:
            found |= {s: found.get(s, name) for s in sorted(set().union(*own) - of_layers, key=str)}
    return found


def _find_single_units(trace: SizeTrace, values: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, str]:
    """Map widths of which one unit would be left, such as a gate's bottleneck, to a parameter that has them."""
    roles = _roles(trace)
    small = {s for s in roles.widths - roles.named_heads if values[s] == 1 < trace.sizes[s]}
    named = {s: name for name, sizes in reversed(trace.tensors.items()) for size in sizes for s in size.free_symbols}
    return {s: named[s] for s in sorted(small & named.keys(), key=str)}


def evaluate(expressions: tuple[sympy.Expr, ...], values: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    """Evaluate sizes as numbers.

    >>> s = sympy.Symbol("s")
    >>> evaluate((3 * s, sympy.Integer(5)), {s: 4})
    (12, 5)
    """
    return tuple(int(_put_in(expression, values)) for expression in expressions)


def _holds(equation: sympy.Basic, values: Mapping[sympy.Symbol, int]) -> bool:
    try:
        return bool(_put_in(equation, values) == sympy.true)
    except ZeroDivisionError:  # a head would have size 0
        return False


def _put_in(expression: sympy.Basic, values: Mapping[sympy.Symbol, int]) -> Any:
    # Replace all symbols at once. `subs` replaces them one after another, so an integer division could divide by zero
    # before the last one is replaced.
    return expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})


def _scaled(size: int, width_ratio: float, unit: int) -> int:
    # Subtract a tolerance. For example, 96 * (1/3) is slightly above 32 in floating point, but must become 32.
    return max(1, math.ceil(size * width_ratio / unit - 1e-9)) * unit


@dataclass(frozen=True)
class _Roles:
    """The roles of symbols: `widths` are rounded up to whole heads, `counts` are numbers of heads, `head_sizes` stay.

    `named_heads` are widths that an attribute with the name of a number of heads holds. An example is the number of
    rows of a parameter with one row for each head.
    """

    widths: frozenset[sympy.Symbol]
    counts: frozenset[sympy.Symbol]
    head_sizes: frozenset[sympy.Symbol]
    named_heads: frozenset[sympy.Symbol]


def _roles(trace: SizeTrace) -> _Roles:
    names: dict[sympy.Symbol, list[str]] = defaultdict(list)
    for (_, attribute), sizes in trace.attributes.items():
        for symbol in (size for size in sizes if size.is_Symbol):
            names[symbol].append(attribute)
    tied = _tied_to(trace.seeds, trace.equations)
    dims = {dim for sizes in trace.tensors.values() for dim in sizes if dim.free_symbols & (tied | trace.seeds)}
    factors = {s for dim in dims for s in dim.free_symbols} - dims
    full = set(evaluate(tuple(dims), trace.sizes))
    # An attribute that is no dimension of a tensor splits a width into heads: it is the number of heads or their size.
    candidates = (tied | trace.seeds) & names.keys() - dims
    parts = {s for s in candidates if s in factors or trace.sizes[s] not in full}
    # Names decide only between two choices that both fit: fewer heads, or smaller ones.
    named_sizes = {s for s, own in names.items() if any(map(_SIZE_OF_HEAD.search, own))}
    named_heads = {s for s, own in names.items() if any(map(_HEADS.search, own))} - named_sizes
    pieces = _pieces(trace, parts - named_sizes - named_heads)
    counts, stay = parts - named_sizes - pieces, parts & named_sizes | pieces
    for product in ({s for s in sympy.Mul.make_args(dim) if s.is_Symbol} for dim in dims):
        if fewer := product & (counts | named_heads):
            # A dimension may be a product, such as heads times head size. Only one factor shrinks. The other factors
            # stay, because other tensors may have them as a size, such as a norm or a buffer of positions.
            stay |= product - {max(fewer, key=lambda s: (s in named_heads, trace.sizes[s], str(s)))}
    stay |= {s for s, of in _determined(trace) if of <= stay}
    widths = (tied | trace.seeds) - parts - stay
    return _Roles(frozenset(widths), frozenset(counts - stay), frozenset(stay), frozenset(widths & named_heads))


def _pieces(trace: SizeTrace, symbols: Collection[sympy.Symbol]) -> set[sympy.Symbol]:
    """Return the symbols that split a layer's output into pieces of a width that a layer reads, as in maxout."""
    dims = {dim for sizes in trace.tensors.values() for dim in sizes}
    read = {dim for sizes in trace.tensors.values() for dim in sizes[1:] if dim.is_Symbol}
    quotients = {side for e in trace.equations if not read.isdisjoint(e.args) for side in e.args}
    return {s for s in symbols if any(s * of in dims for of in read) or any(_divides(s, side) for side in quotients)}


def _divides(divisor: sympy.Symbol, side: sympy.Expr) -> bool:
    return isinstance(side, FloorDiv) and bool(side.args[1] == divisor)


def _tied_to(seeds: Collection[sympy.Symbol], equations: Collection[sympy.Basic]) -> set[sympy.Symbol]:
    """Return the symbols that equations connect to a seed, directly or through other symbols."""
    found: set[sympy.Symbol] = set()
    while new := {s for e in equations if e.free_symbols & {*seeds, *found} for s in e.free_symbols} - found:
        found |= new
    return found


_SIZE_OF_HEAD = re.compile("dim|size|width|channels|features|shape|^d_|^(dh|dk|hd)$")
_HEADS = re.compile("^n_|^num|head|^h$")


def _determined(trace: SizeTrace) -> list[tuple[sympy.Symbol, frozenset[sympy.Symbol]]]:
    """Return pairs of a symbol and other symbols from which an equation computes it, such as half of a head's size."""
    sides = [pair for e in trace.equations for pair in (e.args, e.args[::-1])]
    return [(s, frozenset(of.free_symbols)) for s, of in sides if s.is_Symbol and of.free_symbols - {s}]


def _head_size(trace: SizeTrace, roles: _Roles, width: sympy.Symbol) -> int:
    """Return the number of which `width` must stay a multiple: the size of one head, or 1 if there are no heads."""
    full = trace.sizes[width]
    tied = {s for equation in trace.equations if width in equation.free_symbols for s in equation.free_symbols}
    parts = {s: trace.sizes[s] for s in tied & (roles.counts | roles.head_sizes) if full % trace.sizes[s] == 0}
    return math.lcm(*(full // size if s in roles.counts else size for s, size in parts.items()))
