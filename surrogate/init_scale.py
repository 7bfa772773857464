"""Correct the initial weights of the model's own initializer to the scale that muP asks of a surrogate.

muP states standard deviations relative to the target. A hidden weight needs the target's standard deviation, divided by
sqrt(width_mult). Every other parameter needs the target's standard deviation. The standard deviations of the model's
own initializer are derived from its constructor (`surrogate.init_distributions`), or measured if the constructor does
not reveal them. Weights that are not random do not change, with one exception: a constant that is no hidden weight gets
the target's value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from surrogate.forward_multipliers import UNIT_NORMS, is_computed_by
from surrogate.init_distributions import Law
from surrogate.widths import ParamWidth

_ENOUGH = 4096
"""With this number of elements, a measured scale is right to about 1 %.

At least two models are built. If the smallest measured parameter has too few elements in these, more models are built.
"""
_MOST_BUILDS = 8


def corrections(
    params: Mapping[str, ParamWidth], narrow: Mapping[str, Law], target: Mapping[str, Law]
) -> tuple[dict[str, float], list[str]]:
    """Return factors that correct the initial weights of a surrogate, as far as laws (distributions) reveal them.

    Returns:
        Parameter name -> factor, and the names of the parameters whose laws do not reveal it.
    """
    factors = {}
    for name, param in params.items():
        own, full = narrow[name], target[name]
        if not own.random and (param.is_matrix or not own.constant):
            factors[name] = 1.0
        elif own.size is not None and full.size is not None:
            scale = full.size / own.size if own.size else 1.0
            factors[name] = scale * (param.spread if own.random else 1.0)
    return factors, [name for name in params if name not in factors]


def measured_corrections(
    params: Mapping[str, ParamWidth],
    names: Sequence[str],
    build_narrow: Callable[[], nn.Module],
    build_target: Callable[[], nn.Module],
) -> dict[str, float]:
    """Return the factors that correct the named parameters' initial values, measured on a few models of each width."""
    if not names:
        return {}
    own_sizes, full_sizes = _measure(build_narrow, names), _measure(build_target, names)
    factors = {}
    for name in names:
        own_size, full_size = own_sizes[name], full_sizes[name]
        factors[name] = full_size / own_size * params[name].spread if own_size and full_size else 1.0
    return factors


def _measure(build: Callable[[], nn.Module], names: Sequence[str]) -> dict[str, float | None]:
    """Return each parameter's root mean square over several models; None if all models have the same values."""
    draws = [_values(build, names), _values(build, names)]
    fewest = max(1, min(draws[0][name].numel() for name in names))
    while len(draws) < min(_MOST_BUILDS, _ENOUGH / fewest):
        draws.append(_values(build, names))
    pooled = {name: torch.stack([values[name] for values in draws]) for name in names}
    sizes = {name: float(x.double().square().mean().sqrt()) for name, x in pooled.items()}
    return {name: None if bool((x == x[0]).all()) else sizes[name] for name, x in pooled.items()}


def _values(build: Callable[[], nn.Module], names: Sequence[str]) -> dict[str, Tensor]:
    parameters = dict(build().named_parameters())
    return {name: parameters[name].detach() for name in names}


def rescale(surrogate: nn.Module, factors: Mapping[str, float]) -> None:
    """Multiply parameters by their factors, in place; parameters with a factor of 1 are not touched."""
    with torch.no_grad():
        for name, parameter in surrogate.named_parameters():
            scales = parameter.is_floating_point() or parameter.is_complex()  # a table of indices does not
            if scales and not math.isclose(factors[name], 1.0):
                parameter.mul_(factors[name])


def zero_modules(module: nn.Module, names: tuple[str, ...]) -> None:
    """Zero the weights and biases of the named layers, in place, except weights that are shared with an embedding.

    Under `weight_norm`, only the norms of a weight are zeroed. Raises ValueError for weights whose norm is always 1.
    """
    shared = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)}
    with torch.no_grad():
        for name in names:
            layer = module.get_submodule(name)
            if is_computed_by(UNIT_NORMS, layer):
                raise ValueError(
                    f"`zero_readout` is True, but the weight of {name!r} has a norm of 1 and cannot be zero"
                )
            for own, parameter in layer.named_parameters():
                if id(parameter) not in shared and not own.endswith("weight.original1"):
                    parameter.zero_()
