"""Embedding: the K tables lie one below another, and each member looks up in its own rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusion.rules.member import Member


def embedding(
    K: int,
    input: Member,
    weight: Member,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """`F.embedding`: input [...] of indices, weight [V, E]; the gradient is dense."""
    if weight.dim is None or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    weight_KVE, index_K = weight.lead(K), input.lead(K)
    rows = weight_KVE.shape[1]
    offset_K = torch.arange(0, K * rows, rows, device=index_K.device, dtype=index_K.dtype)
    out = F.embedding(index_K + offset_K.view(K, *[1] * (index_K.dim() - 1)), weight_KVE.flatten(0, 1))
    if padding_idx is not None:
        padding = index_K == padding_idx % rows
        out = torch.where(padding.unsqueeze(-1), out.detach(), out)
    return Member(out, 0)
