"""The update rules, for some parameters of members that use the same rule.

Shape suffixes: B members, n elements of each. p, g, m, v are [B, n]: parameters, their gradients and moments. Every
coefficient is [B, 1] or [B, n] (or None if it is zero for all members), so no rule mixes members. Each rule follows
torch.optim's single-tensor code, with constants folded to save passes over memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_NEUTRAL = {
    "lr": 0.0,
    "momentum": 1.0,
    "gain": 0.0,
    "step_size": 0.0,
    "eps": 1.0,
    "one_minus_beta1": 0.0,
    "one_minus_beta2": 0.0,
    "shrink": 1.0,
}
"""Coefficients with which parameters and moments stay as they are, if the gradient is finite."""


def for_those(takes_B1: Tensor, coefficients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return coefficients with which only members change whose `takes_B1` is True."""
    return {
        name: c if c is None or name not in _NEUTRAL else torch.where(takes_B1, c, _NEUTRAL[name])
        for name, c in coefficients.items()
    }


def sgd(
    p: Tensor,
    g: Tensor,
    m: Tensor | None = None,
    *,
    lr: Tensor,
    weight_decay: Tensor | None,
    momentum: Tensor,
    gain: Tensor,
    direct: Tensor | None,
    buffered: Tensor,
) -> None:
    """Update by SGD: `m = momentum m + gain g`, then `p -= lr (direct g + buffered m)`; `p -= lr g` if m is None.

    g has the weight decay added. `gain` is 1 at a member's first step, then `1 - dampening`. With nesterov, `direct` is
    1 and `buffered` is the momentum; without it they are 0 and 1.
    """
    if weight_decay is not None:
        g = g.addcmul(p, weight_decay)
    if m is None:
        p.addcmul_(g, lr, value=-1)
        return
    m.mul_(momentum).addcmul_(g, gain)
    if direct is None:
        p.addcmul_(m, lr, value=-1)
    else:
        p.addcmul_((g * direct).addcmul_(m, buffered), lr, value=-1)


def adam(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step_size: Tensor,
    eps: Tensor,
    one_minus_beta1: Tensor,
    one_minus_beta2: Tensor,
    weight_decay: Tensor | None,
    shrink: Tensor | None,
) -> None:
    """Adam (Kingma & Ba 2015, Algorithm 1) and AdamW (Loshchilov & Hutter 2019, Algorithm 2).

    With c1 = 1 - beta1^t and c2 = 1 - beta2^t, `step_size` is lr sqrt(c2) / c1 and `eps` is epsilon sqrt(c2). So
    step_size m / (sqrt(v) + eps) = lr (m / c1) / (sqrt(v / c2) + epsilon). `weight_decay` is coupled; `shrink`
    multiplies the weights first, 1 - lr * weight_decay for AdamW.
    """
    if shrink is not None:
        p.mul_(shrink)
    if weight_decay is not None:
        g = g.addcmul(p, weight_decay)
    m.lerp_(g, one_minus_beta1)
    # One temporary for all, because more of them would displace the other tensors from the caches.
    scratch = g.square()
    v.lerp_(scratch, one_minus_beta2)
    denominator = torch.sqrt(v, out=scratch).add_(eps)
    p.addcmul_(torch.div(m, denominator, out=scratch), step_size, value=-1)
