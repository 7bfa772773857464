"""Memory layout of a member's tensors when it is alone: torch draws random numbers in the order of memory."""

from __future__ import annotations

import torch
from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def strides_alone(x_K: Tensor) -> tuple[int, ...]:
    """Return the strides of one member's part of [K, ...]: without gaps, in its order, but channels first.

    The rules of convolutions put channels last, but a member alone has them first.
    """
    dense = torch.empty_like(x_K[0], device="meta")
    last = _CHANNELS_LAST.get(dense.dim())
    if last is not None and dense.is_contiguous(memory_format=last):
        dense = dense.contiguous()
    return dense.stride()


def laid_out(x_K: Tensor) -> Tensor:
    """Return [K, ...] with each member's part in the memory layout that it has alone."""
    strides = strides_alone(x_K)
    if x_K.stride()[1:] == strides:
        return x_K
    dense = torch.empty_strided(x_K.shape, (x_K[0].numel(), *strides), dtype=x_K.dtype, device=x_K.device)
    return dense.copy_(x_K)
