"""The dimensions of a model that are widths, and how much narrower they are than the target's.

A dimension is a width if its size in the surrogate differs from that in the target. Names do not matter. A layer reads
a width if its input size is a width, and writes one if its output size is a width. The base shapes (in the sense of the
`mup` package) are the target's. Every width multiplier of the surrogate is therefore at most 1, and every width
multiplier of the target is exactly 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from mup.infshape import InfDim, InfShape
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized

PLAN_ATTRIBUTE = "width_plan"
"""The attribute in which a surrogate keeps its plan; it survives `copy.deepcopy` and pickling."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParamWidth:
    """How one parameter of the surrogate compares with the target's.

    Attributes:
        shape: Shape in the surrogate; a dimension that differs is a width ("infinite" in mup's words).
        as_read: Target shape and shape in the layout of `shapes_as_read`; None if the parameter is stored in that
            layout.
    """

    target_shape: Shape
    shape: Shape
    as_read: tuple[Shape, Shape] | None = None

    def infshape(self) -> InfShape:
        """Return mup's description of this parameter, whose methods define the multipliers."""
        return _infshape(*(self.as_read or (self.target_shape, self.shape)))

    @property
    def width_mult(self) -> float:
        """Surrogate width over target width in the last dimension that is a width (mup's main one); 1 if none is."""
        return float(self.infshape().width_mult())

    @property
    def is_matrix(self) -> bool:
        """Return whether two dimensions are widths, as in a hidden weight of muP's table."""
        return bool(self.infshape().ninf() == 2)

    @property
    def spread(self) -> float:
        """Standard deviation of the initial weights, divided by that of the target."""
        return self.width_mult**-0.5 if self.is_matrix else 1.0


@lru_cache(maxsize=4096)  # because all models of a plan ask for the same shapes
def _infshape(target_shape: Shape, shape: Shape) -> InfShape:
    return InfShape([InfDim(base if base != dim else None, dim) for base, dim in zip(target_shape, shape)])


@dataclass(frozen=True)
class WidthPlan:
    """Everything that makes a module a surrogate, as plain values.

    Attributes:
        params: Parameter name -> its widths, for every name of `named_parameters()`.
        readouts: Module name -> multiplier of that module's input: 1 / width_mult, or its square root if a
            parametrization fixes the norm of the weight.
        attention: Module name -> multiplier of that module's attention logits, if the head size changed.
        spectral: Module name -> multiplier of that module's input, if the spectral norm of its weight is 1.
        rounded: One line for each width that was rounded up, to a whole number or to a size that fits other sizes.
        kept: One line for each size that `shrink` did not change, with the reason.
    """

    width_ratio: float
    params: Mapping[str, ParamWidth]
    readouts: Mapping[str, float]
    attention: Mapping[str, float]
    rounded: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    spectral: Mapping[str, float] = field(default_factory=dict)

    @property
    def narrower(self) -> tuple[str, ...]:
        """Return the names of the parameters that have a smaller size than in the target."""
        return tuple(name for name, param in self.params.items() if param.shape != param.target_shape)

    @property
    def summary(self) -> str:
        """Return a line that says how many parameters are narrower, and which matrices are not."""
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


def with_data(module: nn.Module) -> nn.Module:
    """Return the module. Raise ValueError if it is on the device "meta", because it has no initial weights there."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            told = f"{name!r} of the model lies on the device 'meta', where it has no data"
            raise ValueError(f"{told}: build it on the CPU")
    return module


def shapes_of(module: nn.Module) -> dict[str, Shape]:
    """Map the name of each parameter to its shape; a tied parameter is listed once, under its first name."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def shapes_as_read(module: nn.Module) -> dict[str, Shape]:
    """Return the shapes (outputs, inputs of an output, *kernel) of parameters that are stored in another layout.

    An `nn.Bilinear` reads all products of its two inputs. A transposed convolution stores its inputs first, then the
    outputs of one group.
    """
    weights: dict[int, Shape] = {}
    for layer in module.modules():
        if isinstance(layer, nn.Bilinear):
            weights[id(input_weight(layer))] = (layer.out_features, layer.in1_features * layer.in2_features)
        elif isinstance(layer, _ConvTransposeNd):
            inputs = layer.in_channels // layer.groups
            weights[id(input_weight(layer))] = (layer.out_channels, inputs, *layer.kernel_size)
    return {name: weights[id(own)] for name, own in module.named_parameters() if id(own) in weights}


_INPUT_WEIGHTS = ("weight", "weight_ih_l0", "weight_ih")
"""Names of the weight by which a layer reads its first input."""


def input_weight(layer: nn.Module) -> Tensor | None:
    """Return the weight by which a layer reads its first input; None if it has none.

    If `torch.nn.utils.parametrizations` computes the weight, return the parameter of the same shape.
    """
    for key in _INPUT_WEIGHTS:
        if is_parametrized(layer, key):
            computed: Any = layer.parametrizations[key]  # type: ignore[index]
            directions = computed.original1 if isinstance(computed[0], _WeightNorm) else None
            weight: Tensor | None = computed.original if computed.is_tensor else directions
            return weight
        if (own := getattr(layer, key, None)) is not None:
            return own if isinstance(own, Tensor) else None
    return None


def compare_widths(target: nn.Module, narrow: nn.Module) -> dict[str, ParamWidth]:
    """Compare the parameters of one model at two widths; see `compare_shapes`."""
    full, own = shapes_as_read(target), shapes_as_read(narrow)
    as_read = {name: (full[name], own[name]) for name in full.keys() & own.keys()}
    return compare_shapes(shapes_of(target), shapes_of(narrow), as_read)


def compare_shapes(
    target: Mapping[str, Shape], narrow: Mapping[str, Shape], as_read: Mapping[str, tuple[Shape, Shape]] | None = None
) -> dict[str, ParamWidth]:
    """Compare two shape tables of one model at two widths.

    Args:
        as_read: Parameter name -> target shape and narrow shape of `shapes_as_read`, for the parameters that it has.

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
            "multiply the hidden sizes by it. If they are rounded up to a least size, raise `width_ratio`"
        )
    params = {name: ParamWidth(target[name], narrow[name], (as_read or {}).get(name)) for name in target}
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
    """Refuse widths of one unit or none, which reveal nothing about a wide layer. One head of full size is allowed."""
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


_INNER_WEIGHTS = ("weight_hr_", "k_proj_weight", "v_proj_weight")
"""Weights of torch's recurrent and attention layers whose input no hook can reach."""


def refuse_inner_readouts(params: Mapping[str, ParamWidth], target: nn.Module) -> None:
    """Refuse a readout inside a layer of torch, because its input needs a multiplier, which no hook can apply."""
    for name, param in params.items():
        path, _, own = name.rpartition(".")
        reads_width = param.shape != param.target_shape and param.shape[:1] == param.target_shape[:1]
        if reads_width and own.startswith(_INNER_WEIGHTS):
            raise ValueError(
                f"parameter {name!r} reads a width and writes a fixed size within layer {path!r} "
                f"({type(target.get_submodule(path)).__name__}), where muP cannot scale its input: let an nn.Linear "
                "behind the layer write that size"
            )


def _counts_heads(name: str, full: int, narrow: nn.Module, target: nn.Module) -> bool:
    """Return whether a module around the parameter `name` has `full` heads, and one head in the narrow model."""
    parts = name.split(".")[:-1]
    around = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
    return any(
        value == 1 and "head" in attribute and vars(target.get_submodule(path)).get(attribute) == full
        for path in around
        for attribute, value in vars(narrow.get_submodule(path)).items()
    )
