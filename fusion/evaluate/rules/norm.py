"""Normalization for K members: one call over K*C channels, with the members' weights and statistics side by side."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.evaluate.rules.conv import fold_channels, unfold_channels
from fusion.evaluate.rules.member import Member


def batch_norm(
    K: int,
    input: Member,
    running_mean: Member | None,
    running_var: Member | None,
    weight: Member | None = None,
    bias: Member | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Compute `F.batch_norm` for K members with input [N, C, ...] each. Running statistics are updated in place."""
    statistics = (running_mean, running_var)
    if not isinstance(momentum, float) or any(training and s is not None and not _is_rows(s) for s in statistics):
        return NotImplemented
    x = fold_channels(input, K)
    mean, var = (None if s is None else _flat(s, K) for s in statistics)
    scale, shift = (None if p is None else _flat(p, K) for p in (weight, bias))
    return unfold_channels(F.batch_norm(x, mean, var, scale, shift, training, momentum, eps), K)


def group_norm(
    K: int, input: Member, num_groups: int, weight: Member | None = None, bias: Member | None = None, eps: float = 1e-5
) -> Any:
    """Compute `F.group_norm` for K members, each with input [N, C, ...], by one call with K*num_groups groups."""
    scale, shift = (None if p is None else _flat(p, K) for p in (weight, bias))
    return unfold_channels(F.group_norm(fold_channels(input, K), K * num_groups, scale, shift, eps), K)


def _is_rows(s: Member) -> bool:
    """Return whether statistics are adjacent rows [K, C], so that an in-place update of a flat view reaches them."""
    return s.dim == 0 and s.value.is_contiguous()


def _flat(p: Member, K: int) -> Tensor:
    return p.lead(K).reshape(-1)


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    """Compute `F.normalize` under `vmap`.

    `vmap` does not support `out`, which torch's spectral norm uses. So the result is copied to `out`.
    """
    normalized = input / input.norm(p, dim, keepdim=True).clamp_min(eps).expand_as(input)
    return normalized if out is None else out.copy_(normalized)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return g * v / norm(v) like `torch._weight_norm`: the norm is over all axes but `dim`, or all if `dim` is -1."""
    others = [d for d in range(v.dim()) if d != dim]
    scale: Tensor = g / torch.linalg.vector_norm(v, dim=others, keepdim=dim != -1)
    return v * scale
