"""The dimensions of a model that are widths, and how much narrower they are than the target's.

Read off by comparing shapes, never names. The base shapes (in the sense of the `mup` package) are the target's.
Every width multiplier of the surrogate is therefore at most 1, and those of the target are exactly 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mup.infshape import InfDim, InfShape
from torch import nn

PLAN_ATTRIBUTE = "width_plan"
"""The attribute in which a surrogate keeps its plan; it survives `copy.deepcopy` and pickling."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParamWidth:
    """How one parameter of the surrogate compares with the target's.

    Attributes:
        shape: Shape in the surrogate; a dimension that differs is a width ("infinite" in mup's words).
        bilinear: True for the weight of an `nn.Bilinear`, which reads all products of its two inputs.
    """

    target_shape: Shape
    shape: Shape
    bilinear: bool = False

    def infshape(self) -> InfShape:
        """mup's own view of this parameter; its methods define what the multipliers are."""
        return _infshape(_as_read(self.target_shape, self.bilinear), _as_read(self.shape, self.bilinear))

    @property
    def width_mult(self) -> float:
        """Surrogate width over target width along mup's main dimension, the last width; 1 if none is one."""
        return float(self.infshape().width_mult())

    @property
    def is_matrix(self) -> bool:
        """Return whether two dimensions are widths: a hidden weight in muP's table."""
        return bool(self.infshape().ninf() == 2)

    @property
    def spread(self) -> float:
        """Standard deviation of the initial weights over the target's."""
        return self.width_mult**-0.5 if self.is_matrix else 1.0


@lru_cache(maxsize=4096)  # each model of one plan asks for the same, a hundred times
def _infshape(target_shape: Shape, shape: Shape) -> InfShape:
    return InfShape([InfDim(base if base != dim else None, dim) for base, dim in zip(target_shape, shape)])


def _as_read(shape: Shape, bilinear: bool) -> Shape:
    return (shape[0], shape[1] * shape[2]) if bilinear else shape


@dataclass(frozen=True)
class WidthPlan:
    """Everything that makes a module a surrogate, as plain values.

    Attributes:
        params: Parameter name -> its widths, for every name of `named_parameters()`.
        readouts: Module name -> multiplier of that module's input, 1 / width_mult.
        attention: Module name -> multiplier of that module's attention logits, where the head size changed.
        rounded: Widths that did not divide and were rounded, one line each.
        kept: Sizes that `shrink` left as they are, and why, one line each.
    """

    width_ratio: float
    params: Mapping[str, ParamWidth]
    readouts: Mapping[str, float]
    attention: Mapping[str, float]
    rounded: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def narrower(self) -> tuple[str, ...]:
        """Names of the parameters that have a smaller size than in the target."""
        return tuple(name for name, param in self.params.items() if param.shape != param.target_shape)

    @property
    def summary(self) -> str:
        """One line: how many parameters are narrower, and which matrices stay as they are."""
        alike = [name for name, p in self.params.items() if p.shape == p.target_shape and len(p.shape) > 1]
        stay = [f"{_listed(alike)} stay" + "s" * (len(alike) == 1)] * bool(alike)
        told = "; ".join([*stay, *self.kept[:_SHOWN], *["..."] * (len(self.kept) > _SHOWN)])
        return f"{len(self.narrower)} of {len(self.params)} parameters are narrower" + (f" ({told})" if told else "")

    @property
    def mostly_wide(self) -> bool:
        """Return whether less than half of the parameters are narrower: such a model saves little."""
        return 2 * len(self.narrower) < len(self.params)


_SHOWN = 3


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def shapes_of(module: nn.Module) -> dict[str, Shape]:
    """Parameter name -> shape; a tied parameter is listed once, under its first name."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def compare_widths(target: nn.Module, narrow: nn.Module) -> dict[str, ParamWidth]:
    """Compare the parameters of one model at two widths; see `compare_shapes`."""
    weights = {id(layer.weight) for layer in narrow.modules() if isinstance(layer, nn.Bilinear)}
    bilinear = {name for name, parameter in narrow.named_parameters() if id(parameter) in weights}
    return compare_shapes(shapes_of(target), shapes_of(narrow), bilinear)


def compare_shapes(
    target: Mapping[str, Shape], narrow: Mapping[str, Shape], bilinear: Collection[str] = ()
) -> dict[str, ParamWidth]:
    """Compare two shape tables of one model at two widths.

    Args:
        bilinear: Names of the weights of `nn.Bilinear`.

    Raises:
        ValueError: if the names or the numbers of dimensions differ, or no dimension differs. If a dimension of the
            narrow model is larger than the target's. If a parameter has more than two widths: muP has no rule for it.
    """
    if target.keys() != narrow.keys():
        differing = sorted(target.keys() ^ narrow.keys())
        raise ValueError(
            f"`model_fn` builds other parameter names at another width_ratio: {differing[:5]} exist at one width only; "
            "the width ratio may change sizes alone (keep the depth and the kind of every layer)"
        )
    for name, base in target.items():
        if len(base) != len(narrow[name]):
            raise ValueError(
                f"parameter {name!r} has {len(base)} dimensions in the target and {len(narrow[name])} in the "
                "surrogate; the width ratio may change sizes alone"
            )
        if any(dim > full for dim, full in zip(narrow[name], base)):
            raise ValueError(
                f"the surrogate is wider than the target: parameter {name!r} is {narrow[name]} in the "
                f"surrogate and {base} at width_ratio=1.0; sizes must not grow as width_ratio falls"
            )
    if all(target[name] == narrow[name] for name in target):
        raise ValueError(
            "`model_fn` ignores width_ratio: every parameter has the same shape as at width_ratio=1.0; "
            "multiply the hidden sizes by it"
        )
    params = {name: ParamWidth(target[name], narrow[name], name in bilinear) for name in target}
    _check_width_count(params)
    return params


def _check_width_count(params: Mapping[str, ParamWidth]) -> None:
    for name, param in params.items():
        widths = param.infshape().ninf()
        if widths > 2:
            raise ValueError(
                f"parameter {name!r} changes in {widths} dimensions ({param.target_shape} to {param.shape}), but muP "
                "has rules for at most 2; keep the others at their full size"
            )


def refuse_single_units(params: Mapping[str, ParamWidth], narrow: nn.Module, target: nn.Module) -> None:
    """Refuse a width of one unit or none, which says nothing of a wide layer; one head of the target's size is fine."""
    for name, param in params.items():
        if 0 in param.shape and 0 not in param.target_shape:
            raise ValueError(
                f"parameter {name!r} is {param.shape} in the surrogate and {param.target_shape} in the target: a width "
                "falls to no unit at all, as int() rounds down. Make the surrogate wider, or round up: "
                "max(2, round(size * width_ratio))"
            )
        fallen = [full for full, size in zip(param.target_shape, param.shape) if size == 1 < full]
        if any(not _counts_heads(name, full, narrow, target) for full in fallen):
            raise ValueError(
                f"parameter {name!r} is {param.shape} in the surrogate and {param.target_shape} in the target: a width "
                f"of {max(fallen)} falls to one unit, which ranks hyperparameters like no wide layer. Make the "
                f"surrogate wider (a width ratio of {2 / min(fallen):.3g} leaves two units), or keep that size fixed"
            )


def _counts_heads(name: str, full: int, narrow: nn.Module, target: nn.Module) -> bool:
    """Return whether a size of a parameter is the number of heads of a module around it, which is 1 now."""
    parts = name.split(".")[:-1]
    around = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
    return any(
        value == 1 and "head" in attribute and vars(target.get_submodule(path)).get(attribute) == full
        for path in around
        for attribute, value in vars(narrow.get_submodule(path)).items()
    )
