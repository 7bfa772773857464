"""Initial weights: the model's own initializer, corrected to what muP asks of a surrogate.

muP relative to the target: a hidden weight's standard deviation is the target's / sqrt(width_mult); every
other parameter's is the target's. How the model's initializer itself depends on width (torch's defaults
shrink with 1 / sqrt(fan_in), GPT-2 and BERT start at 0.02 at any width) is measured between two narrow
builds, as an exponent:

    std(width) ~ width ** exponent,  exponent = 0 or -1/2
    correction = width_mult ** (-1/2 - exponent)  hidden weights
    correction = width_mult ** (-exponent)        all others
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from surrogate.widths import ParamWidth

_FEW = 1024
"""Below this many elements a random parameter's own spread is too noisy to tell the two laws apart."""


def rescale_initial_weights(
    surrogate: nn.Module,
    other: nn.Module,
    params: Mapping[str, ParamWidth],
    *,
    zero_readout: tuple[str, ...] = (),
) -> None:
    """Correct the freshly initialized `surrogate` in place.

    Args:
        surrogate: The narrow model as its own initializer left it.
        other: The same model at another narrow width, freshly initialized too.
        params: The surrogate's widths relative to the target.
        zero_readout: Names of readout modules whose weight and bias start at zero; a weight tied to an
        embedding stays.
    """
    spreads = _spreads(surrogate, other, params)
    with torch.no_grad():
        for name, parameter in surrogate.named_parameters():
            wanted = params[name].width_mult ** (-0.5 if params[name].is_matrix else 0.0)
            if wanted != spreads[name]:
                parameter.mul_(wanted / spreads[name])
    zero_modules(surrogate, zero_readout)


def _spreads(surrogate: nn.Module, other: nn.Module, params: Mapping[str, ParamWidth]) -> dict[str, float]:
    """Parameter name -> its standard deviation over the target's, as the model's own initializer has it."""
    others = dict(other.named_parameters())
    spreads: dict[str, float] = {}
    for prefix, layer in surrogate.named_modules():
        joined = ((f"{prefix}.{key}" if prefix else key, p) for key, p in layer.named_parameters(recurse=False))
        own = {name: parameter for name, parameter in joined if name in params}
        for name, parameter in own.items():
            # torch draws a layer's bias from its weight's bound, so the weight speaks for a bias too short to
            # measure.
            noisy = parameter.numel() < _FEW and _is_random(parameter)
            source = max(own, key=lambda key: own[key].numel()) if noisy else name
            spreads[name] = params[source].width_mult ** _exponent(own[source], others[source])
    return spreads


def _exponent(here: Tensor, there: Tensor) -> float:
    ratio = ParamWidth(tuple(there.shape), tuple(here.shape)).width_mult
    size_here, size_there = _size(here), _size(there)
    if ratio == 1.0 or size_here == 0.0 or size_there == 0.0:
        return 0.0
    slope = math.log(size_here / size_there) / math.log(ratio)
    return -0.5 if slope < -0.25 else 0.0


def _size(parameter: Tensor) -> float:
    """Root mean square."""
    return float(parameter.detach().double().square().mean().sqrt())


def _is_random(parameter: Tensor) -> bool:
    return bool((parameter != parameter.flatten()[0]).any())


def zero_modules(module: nn.Module, names: tuple[str, ...]) -> None:
    """Zero the weights and biases of the named layers, in place, but for weights shared with an embedding."""
    shared = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    with torch.no_grad():
        for name in names:
            for parameter in module.get_submodule(name).parameters():
                if id(parameter) not in shared:
                    parameter.zero_()
