"""Writes to a part of a tensor, which a boolean mask or an index selects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.evaluate.rules.member import Member


def set_item(K: int, x: Member, index: Any, value: Any) -> Any:
    """Do `Tensor.__setitem__` for K members, each with one boolean mask and one number for all chosen elements.

    Torch's own rule fails, because the number of chosen elements depends on each member's data.
    """
    is_mask = isinstance(index, Member) and index.value.dtype == torch.bool and index.dim is not None
    ndim = value.value.ndim - (value.dim is not None) if isinstance(value, Member) else 0
    if x.dim is None or not is_mask or ndim:
        return NotImplemented
    whole_K, mask_K = x.value.movedim(x.dim, 0), index.lead(K)
    if mask_K.shape != whole_K.shape[: mask_K.ndim]:
        return NotImplemented  # torch's own function raises the error
    mask_K = mask_K.reshape(*mask_K.shape, *(1,) * (whole_K.ndim - mask_K.ndim))
    if isinstance(value, Member):
        numbers_K: Tensor = value.lead(K).to(whole_K.dtype).reshape(K, *(1,) * (whole_K.ndim - 1))
        whole_K.copy_(torch.where(mask_K, numbers_K, whole_K))
    else:
        whole_K.masked_fill_(mask_K, value)
    return None


def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Any:
    """Compute `torch.select_scatter` under `vmap`. Torch's own gradient of `src` is wrong there (torch 2.13)."""
    if not -input.dim() <= dim < input.dim() or not -input.shape[dim] <= index < input.shape[dim]:
        return NotImplemented  # torch's own function raises the error
    start = index % input.shape[dim]
    return torch.slice_scatter(input, src.unsqueeze(dim), dim, start, start + 1)
