"""Gradient clipping by each member's own norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusion.argument_checks import require
from fusion.members.fused_model import FusedModel, check_fused
from fusion.members.member_indices import member_vector
from fusion.members.rows import FlatParameters, make_dense
from fusion.optim import native


@torch.no_grad()
def clip_grad_norm_(fused: FusedModel, max_norm: float | Sequence[float] | Tensor) -> Tensor:
    """Clip each member's gradients by the member's own norm, as `torch.nn.utils.clip_grad_norm_` does for one model.

    Args:
        fused: The model, after `backward`.
        max_norm: The largest 2-norm of all gradients of a member: one number for all members, or [K]. With inf, nothing
            is clipped.

    Returns:
        The norms before clipping, [K]. If a member's norm is infinite or NaN, the other members are not affected.

    Raises:
        ValueError: if `max_norm` is negative or has another length than K.
    """
    check_fused(fused)
    limits = _limits(max_norm, fused.K)
    grads, flat = gradients(fused)
    if not grads:
        return torch.zeros(fused.K)
    norm_K1 = _norms(grads)
    if flat is None:
        limit_K1 = torch.tensor(limits, dtype=norm_K1.dtype)[:, None]
        unlimited_K1 = torch.isinf(limit_K1)
    else:
        limit_K1 = flat.on_device(limits, norm_K1.dtype)
        unlimited_K1 = flat.on_device(tuple(map(math.isinf, limits)), torch.bool)
    # Add 1e-6 to the norm, as torch does. If the limit is inf, set the scale to 1, because inf / inf would be NaN.
    scale_K1 = (limit_K1 / (norm_K1 + 1e-6)).clamp_(max=1.0).masked_fill_(unlimited_K1, 1.0)
    for grad in grads:
        scale = scale_K1.to(grad.dtype)
        grad.mul_(scale if grad.ndim == 2 else scale.view(-1, *(1,) * (grad.ndim - 1)))
    return norm_K1[:, 0]


def gradients(fused: FusedModel) -> tuple[list[Tensor], FlatParameters | None]:
    """Return the gradients that the update will read, and the `FlatParameters` if these gradients are in rows.

    In rows (`fusion.members.rows`), the gradients are matrices [K, N]. Otherwise they are [K, ...] each, and the second
    result is None.
    """
    # Include frozen parameters that are already in rows. Without them, `fused.flat` would get other names than in its
    # last call, and would move all parameters into new rows.
    parameters = {name: p for name, p in fused.stacked.items() if p.requires_grad or fused.in_rows(name)}
    make_dense(parameters.values())
    grads = [p.grad for p in parameters.values() if p.grad is not None]
    if not grads or native.takes_in_place(fused, list(parameters.values())):
        return grads, None
    flat = fused.flat(parameters)
    flat.gather(parameters)
    return list(flat.gradients.blocks.values()), flat


def _limits(max_norm: float | Sequence[float] | Tensor, K: int) -> tuple[float, ...]:
    """Check and return each member's largest norm. Lists of floats take a fast path, because each step calls this."""
    if isinstance(max_norm, float):
        limits = (max_norm,) * K
    elif isinstance(max_norm, list) and len(max_norm) == K and all(isinstance(limit, float) for limit in max_norm):
        limits = tuple(max_norm)
    else:
        limits = tuple(member_vector("max_norm", max_norm, K).tolist())
    require(all(limit >= 0 for limit in limits), "max_norm", list(limits), ">= 0")
    return limits


def _norms(grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of each member's gradients, [K, 1]."""
    norms: list[Tensor] = [
        torch.linalg.vector_norm(g.flatten(1) if g.ndim > 1 else g[:, None], dim=1, keepdim=True) for g in grads
    ]
    if len(norms) == 1:
        return norms[0]
    joined = torch.cat(norms, 1)  # `cat` converts to the widest of their dtypes, as torch does
    norm_K1: Tensor = torch.linalg.vector_norm(joined, dim=1, keepdim=True)
    return norm_K1
