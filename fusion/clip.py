"""Gradient clipping that knows its members."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusion.checks import require
from fusion.members import member_vector
from fusion.model import FusedModel


@torch.no_grad()
def clip_grad_norm_(fused: FusedModel, max_norm: float | Sequence[float] | Tensor) -> Tensor:
    """Scale each member's gradients down to a norm of its own, as `torch.nn.utils.clip_grad_norm_` does for one.

    Args:
        fused: The model, after `backward`.
        max_norm: The largest 2-norm over all of a member's gradients, one for all members or [K]; inf clips
            nothing.

    Returns:
        The norms before clipping, [K]. A member whose norm is infinite or NaN affects no other.

    Raises:
        ValueError: where `max_norm` is negative or has another length than K.
    """
    limit_K = member_vector("max_norm", max_norm, fused.K)
    require(bool((limit_K >= 0).all()), "max_norm", limit_K.tolist(), ">= 0")
    grads = [p.grad for p in fused.stacked.values() if p.grad is not None]
    if not grads:
        return torch.zeros(fused.K)
    norms = [torch.linalg.vector_norm(g.flatten(1) if g.ndim > 1 else g[:, None], dim=1) for g in grads]
    norm_K: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]), dim=0)
    # torch divides by norm + 1e-6 too; where nothing is to be clipped, inf / inf must not make a NaN.
    scale_K = (limit_K.to(norm_K) / (norm_K + 1e-6)).clamp(max=1.0)
    scale_K = torch.where(torch.isinf(limit_K).to(norm_K.device), 1.0, scale_K)
    for grad in grads:
        grad.mul_(scale_K.to(grad.dtype).view(-1, *(1,) * (grad.ndim - 1)))
    return norm_K
