"""Dropout: every member draws a mask of its own, with a probability of its own if that is a tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.rules.member import Member


def dropout(K: int, input: Member, p: float | Member = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """`F.dropout`: `p` is one probability for all members, or a tensor with one for each."""
    if not training or (not isinstance(p, Member) and p == 0):
        return input
    if inplace and input.dim is None:
        return NotImplemented
    x_K = input.lead(K)
    if not isinstance(p, Member):
        return Member(F.dropout(x_K, p, True, inplace), 0)
    mask_K = _mask(x_K, p.lead(K).detach())
    return Member(x_K.mul_(mask_K) if inplace else x_K * mask_K, 0)


def _mask(x_K: Tensor, p_K: Tensor) -> Tensor:
    """0 with probability p, else 1 / (1 - p), so that the mean stays. At p = 1 all is 0."""
    kept = torch.empty(x_K.shape, dtype=x_K.dtype, device=x_K.device)
    if x_K.is_cuda:
        keep_K = (1 - p_K).reshape(-1, *[1] * (x_K.dim() - 1)).expand(x_K.shape)
        torch.bernoulli(keep_K.to(x_K.dtype), out=kept)
    else:
        # Drawn from a number, not from a tensor of numbers, the CPU's Bernoulli is vectorized and threaded.
        for row, p in zip(kept, p_K.reshape(-1).tolist()):
            row.bernoulli_(1 - p)
    scale_K = torch.where(p_K < 1, 1 / (1 - p_K), 0.0).to(x_K.dtype)
    return kept.mul_(scale_K.reshape(-1, *[1] * (x_K.dim() - 1)))
