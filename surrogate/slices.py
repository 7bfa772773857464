"""Narrower weights, taken from the wide ones.

A random part of each weight has the spread that the model's own initializer gave the whole, whatever it was.
By muP, a hidden weight's spread then grows with 1 / sqrt(width_mult), and all others stay. A constant, or an identity,
stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from surrogate.widths import ParamWidth, Shape

_FIRST = 16


def take_part(tensor: Tensor, shape: Shape, gates: int = 1) -> Tensor:
    """Random rows, columns, ... of `tensor`, in their order; drawn from torch's global generator.

    Args:
        gates: The rows are so many equal parts, such as a GRU's gates, and the same rows of each part are taken.

    >>> take_part(torch.arange(6.0), (6,))
    tensor([0., 1., 2., 3., 4., 5.])
    """
    if gates > 1 and shape[0] < len(tensor):
        each = shape[0] // gates
        return take_part(tensor.unflatten(0, (gates, -1)), (gates, each, *shape[1:])).flatten(0, 1)
    for dim, (full, size) in enumerate(zip(tensor.shape, shape)):
        if size < full:
            kept = torch.randperm(full)[:size].sort().values.to(tensor.device)
            tensor = tensor.index_select(dim, kept)
    return tensor.clone()


def fill_from_target(narrow: nn.Module, target: nn.Module, params: Mapping[str, ParamWidth]) -> None:
    """Give `narrow` its initial weights, in place."""
    wide, gates = dict(target.named_parameters()), _gates(target)
    with torch.no_grad():
        for name, parameter in narrow.named_parameters():
            full = wide[name].detach()
            part = take_part(full, tuple(parameter.shape), gates.get(name, 1))
            if _is_pattern(full):
                parameter.copy_(_first(full, tuple(parameter.shape), gates.get(name, 1)))
            else:
                parameter.copy_(part * params[name].spread)


def _first(tensor: Tensor, shape: Shape, gates: int) -> Tensor:
    if gates > 1:
        return _first(tensor.unflatten(0, (gates, -1)), (gates, shape[0] // gates, *shape[1:]), 1).flatten(0, 1)
    return tensor[tuple(slice(size) for size in shape)]


def _gates(module: nn.Module) -> dict[str, int]:
    """Parameter name -> how many equal parts its rows are: a recurrent layer's gates, or query, key and value."""
    found = {}
    for path, layer in module.named_modules():
        for own, parameter in layer.named_parameters(recurse=False):
            if isinstance(layer, nn.RNNBase | nn.RNNCellBase) and not own.startswith("weight_hr"):
                found[f"{path}.{own}" if path else own] = len(parameter) // layer.hidden_size
            elif isinstance(layer, nn.MultiheadAttention) and own.startswith("in_proj"):
                found[f"{path}.{own}" if path else own] = 3
    return found


def _is_pattern(tensor: Tensor) -> bool:
    """Return whether a tensor holds no more than two values: a constant, or an identity."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if len(tensor.flatten()[:_FIRST].unique()) > 2:  # most tensors: the rest need not be read
        return False
    return bool(((tensor == tensor.min()) | (tensor == tensor.max())).all())
