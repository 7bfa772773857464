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


def take_part(tensor: Tensor, shape: Shape) -> Tensor:
    """Random rows, columns, ... of `tensor`, in their order; drawn from torch's global generator.

    >>> take_part(torch.arange(6.0), (6,))
    tensor([0., 1., 2., 3., 4., 5.])
    """
    for dim, (full, size) in enumerate(zip(tensor.shape, shape)):
        if size < full:
            kept = torch.randperm(full)[:size].sort().values.to(tensor.device)
            tensor = tensor.index_select(dim, kept)
    return tensor.clone()


def fill_from_target(narrow: nn.Module, target: nn.Module, params: Mapping[str, ParamWidth]) -> None:
    """Give `narrow` its initial weights, in place."""
    wide = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in narrow.named_parameters():
            full = wide[name].detach()
            part = take_part(full, tuple(parameter.shape))
            if _is_pattern(full):
                parameter.copy_(full[tuple(slice(size) for size in parameter.shape)])
            else:
                parameter.copy_(part * params[name].spread)


def _is_pattern(tensor: Tensor) -> bool:
    """Return whether a tensor holds no more than two values: a constant, or an identity."""
    if len(tensor.flatten()[:_FIRST].unique()) > 2:  # most tensors: the rest need not be read
        return False
    return bool(((tensor == tensor.min()) | (tensor == tensor.max())).all())
