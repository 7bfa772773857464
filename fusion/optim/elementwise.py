"""The update rules that work element by element, for members that use the same rule.

Shape suffixes: B members, n elements of each member. The tensors p, g, m, v are [B, n]: parameters, gradients and
moments. Each coefficient is [B, 1] or [B, n]; an optional one is None if no member needs it. No rule mixes members.
Rules follow the single-tensor code of torch.optim, with constants folded to save passes over memory. `decayed` is
called before each rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_NEUTRAL = {
    "lr": 0.0,
    "momentum": 1.0,
    "gain": 0.0,
    "first": 0.0,
    "share": 0.0,
    "move": 0.0,
    "pull": 0.0,
    "square_keep": 1.0,
    "square_gain": 0.0,
    "sum_keep": 1.0,
    "sum_gain": 0.0,
    "step_size": 0.0,
    "eps": 1.0,
    "one_minus_alpha": 0.0,
    "one_minus_beta1": 0.0,
    "one_minus_beta2": 0.0,
    "shrink": 1.0,
    "keep": 1.0,
    "least": -math.inf,
    "of_gradient": 0.0,
    "of_moment": 0.0,
}
"""Values of coefficients that make a rule change nothing, provided that the gradient is finite."""


def for_those(takes_B1: Tensor, coefficients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return `coefficients`, with values that leave a member unchanged (`_NEUTRAL`) where its `takes_B1` is False."""
    return {
        name: c if c is None or name not in _NEUTRAL else torch.where(takes_B1, c, _NEUTRAL[name])
        for name, c in coefficients.items()
    }


def decayed(p: Tensor, g: Tensor, shrink: Tensor | None, weight_decay: Tensor | None) -> Tensor:
    """Apply the weight decay, and return the gradient to use.

    A decoupled decay multiplies p by `shrink` in place, for example by 1 - lr * weight_decay for AdamW. A coupled decay
    returns `g + weight_decay p`. An argument that is None is not applied.
    """
    if shrink is not None:
        p.mul_(shrink)
    return g if weight_decay is None else g.addcmul(p, weight_decay)


def sgd(
    p: Tensor,
    g: Tensor,
    m: Tensor | None = None,
    *,
    lr: Tensor,
    momentum: Tensor,
    gain: Tensor,
    direct: Tensor | None,
    buffered: Tensor,
) -> None:
    """Update by SGD: `m = momentum m + gain g`, then `p -= lr (direct g + buffered m)`; `p -= lr g` if m is None.

    `gain` is 1 at a member's first step, then `1 - dampening`. With Nesterov momentum, `direct` is 1 and `buffered` is
    the momentum. Without it, `direct` is 0 and `buffered` is 1. `direct` is None if no member uses Nesterov momentum.
    """
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
) -> None:
    """Adam (Kingma & Ba 2015, Algorithm 1) and AdamW (Loshchilov & Hutter 2019, Algorithm 2).

    With c1 = 1 - beta1^t and c2 = 1 - beta2^t, `step_size` is lr sqrt(c2) / c1 and `eps` is epsilon sqrt(c2). So
    step_size m / (sqrt(v) + eps) = lr (m / c1) / (sqrt(v / c2) + epsilon).
    """
    m.lerp_(g, one_minus_beta1)
    # Reuse one temporary tensor, because more of them would displace the other tensors from the CPU's caches.
    scratch = g.square()
    v.lerp_(scratch, one_minus_beta2)
    denominator = torch.sqrt(v, out=scratch).add_(eps)
    p.addcmul_(torch.div(m, denominator, out=scratch), step_size, value=-1)


def adamax(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    u: Tensor,
    *,
    step_size: Tensor,
    one_minus_beta1: Tensor,
    keep: Tensor,
    least: Tensor,
) -> None:
    """Adamax (Kingma & Ba 2015, Algorithm 2): `u = max(beta2 u, |g| + eps)`, then `p -= step_size m / u`.

    `keep` is beta2, `least` epsilon, and `step_size` lr / (1 - beta1^t).
    """
    m.lerp_(g, one_minus_beta1)
    torch.maximum(u.mul_(keep), g.abs().add_(least), out=u)
    # Clamp u: in a member that skips its first step, m and u are 0, and 0 / 0 would be NaN.
    p.addcmul_(m / u.clamp(min=torch.finfo(u.dtype).tiny), step_size, value=-1)


def lion(p: Tensor, g: Tensor, m: Tensor, *, lr: Tensor, one_minus_beta1: Tensor, one_minus_beta2: Tensor) -> None:
    """Lion (Chen et al. 2023, Algorithm 2): `p -= lr sign(beta1 m + (1 - beta1) g)`, `m = beta2 m + (1 - beta2) g`."""
    p.addcmul_(m.lerp(g, one_minus_beta1).sign_(), lr, value=-1)
    m.lerp_(g, one_minus_beta2)


def nadam(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    of_gradient: Tensor,
    of_moment: Tensor,
    eps: Tensor,
    one_minus_beta1: Tensor,
    one_minus_beta2: Tensor,
) -> None:
    """NAdam (Dozat 2016): `p -= (of_gradient g + of_moment m) / (sqrt(v) + eps)`, with the moments of Adam.

    As in `adam`, the root of v's bias correction is folded into both coefficients and `eps`.
    """
    m.lerp_(g, one_minus_beta1)
    v.lerp_(g.square(), one_minus_beta2)
    p.sub_((g * of_gradient).addcmul_(m, of_moment).div_(v.sqrt().add_(eps)))


def prodigy_sums(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    s: Tensor,
    start: Tensor,
    *,
    first: Tensor,
    momentum: Tensor,
    gain: Tensor,
    square_keep: Tensor,
    square_gain: Tensor,
    sum_keep: Tensor,
    sum_gain: Tensor,
) -> Tensor:
    """Update Prodigy's state, and return the sums [B, 2] from which it estimates its step size; see `learn_distance`.

    `first` is 1 at the first step, which copies the weights to `start`, and 0 later. The other coefficients come in
    pairs: one multiplies an old value, the other one the term that is added to it. The pairs are `momentum` and `gain`
    for m, `square_keep` and `square_gain` for v, and `sum_keep` and `sum_gain` for the weighted sum s of the gradients.
    """
    start.lerp_(p, first)
    m.mul_(momentum).addcmul_(g, gain)
    v.mul_(square_keep).addcmul_(g.square(), square_gain)
    s.mul_(sum_keep).addcmul_(g, sum_gain)
    return torch.stack([torch.linalg.vecdot(g, start - p), torch.linalg.vector_norm(s, 1, dim=1)], 1)


def prodigy(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: Tensor, start: Tensor, *, step_size: Tensor, eps: Tensor
) -> None:
    """Prodigy (Mishchenko & Defazio 2024, Algorithm 4), after `prodigy_sums`: `p -= step_size m / (sqrt(v) + eps)`."""
    p.addcmul_(m / v.sqrt().add_(eps), step_size, value=-1)


def radam(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step_size: Tensor,
    rectified: Tensor,
    plain: Tensor,
    eps: Tensor,
    one_minus_beta1: Tensor,
    one_minus_beta2: Tensor,
) -> None:
    """RAdam (Liu et al. 2020, Algorithm 2): `p -= step_size m (rectified / (sqrt(v) + eps) + plain)`.

    In the first steps, `rectified` is 0 and `plain` is 1. Later, `rectified` is the rectification times the root of v's
    bias correction, and `plain` is 0.
    """
    m.lerp_(g, one_minus_beta1)
    v.lerp_(g.square(), one_minus_beta2)
    scale = (rectified / v.sqrt().add_(eps)).add_(plain)
    p.addcmul_(scale.mul_(m), step_size, value=-1)


def rmsprop(
    p: Tensor,
    g: Tensor,
    v: Tensor,
    m: Tensor | None = None,
    *,
    lr: Tensor,
    one_minus_alpha: Tensor,
    eps: Tensor,
    momentum: Tensor,
    gain: Tensor,
) -> None:
    """RMSprop as in torch: `m = momentum m + gain g / (sqrt(v) + eps)`, then `p -= lr m`.

    `gain` is 1, or 0 for a member that skips the step. If m is None, `p -= lr g / (sqrt(v) + eps)`.
    """
    v.lerp_(g.square(), one_minus_alpha)
    scaled = g / v.sqrt().add_(eps)
    if m is not None:
        scaled = m.mul_(momentum).addcmul_(scaled, gain)
    p.addcmul_(scaled, lr, value=-1)


def schedule_free(
    p: Tensor,
    g: Tensor,
    z: Tensor,
    v: Tensor | None = None,
    *,
    first: Tensor,
    share: Tensor,
    move: Tensor,
    step_size: Tensor,
    pull: Tensor | None,
    eps: Tensor | None = None,
    one_minus_beta2: Tensor | None = None,
) -> None:
    """Schedule-Free SGD, or AdamW if v is given (Defazio et al. 2024, Algorithm 1).

    p are the weights at which gradients are taken. The direction u is g for SGD, and `g / (sqrt(v) + eps)` for AdamW.
    The rule is `p = lerp(p, z, share) + move (u + pull p)` and `z -= step_size (u + pull p)`. `first` is 1 at the first
    step, which copies the weights to z, and 0 later.
    """
    z.lerp_(p, first)
    if v is not None:
        assert one_minus_beta2 is not None
        assert eps is not None
        scratch = g.square()
        v.lerp_(scratch, one_minus_beta2)
        g = torch.div(g, torch.sqrt(v, out=scratch).add_(eps), out=scratch)
    if pull is not None:
        g = g.addcmul(p, pull)
    p.lerp_(z, share).addcmul_(g, move)
    z.addcmul_(g, step_size, value=-1)
