"""Adafactor (Shazeer & Stern 2018, Algorithms 4 and 5) as `torch.optim.Adafactor` has it, for many members at once.

Shape suffixes: R members of a run (adjacent members with one rule). A parameter is [R, ..., m, n]. Its second moment is
stored as means over rows and over columns, [R, ..., m, 1] and [R, ..., 1, n]. If a parameter has at most one dimension
per member, its second moment is stored whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fusion.optim.members_by_rule import RuleMembers, wide

_EPS2, _D = 1e-3, 1.0
"""Defaults of torch.optim.Adafactor.

The learning rate is multiplied by the root mean square of the weights, or by `_EPS2` if that is larger. An update is
scaled down if its root mean square exceeds `_D`.
"""

STATE: Mapping[str, Callable[[Tensor], Tensor | None]] = {
    "row": lambda p: p[..., :1] if p.dim() > 2 else None,
    "column": lambda p: p[..., :1, :] if p.dim() > 2 else None,
    "variance": lambda p: None if p.dim() > 2 else p,
}
"""Name of a state -> function that takes a stacked parameter and returns a tensor of the state's shape.

The function returns None if the parameter does not have this state.
"""


def update(
    stored: Sequence[Sequence[Tensor]],
    run: RuleMembers,
    rates: Sequence[Tensor],
    decays: Sequence[Tensor],
    steps: Sequence[Tensor],
    takes_R: Tensor | None = None,
) -> None:
    """Update parameters of R members, in place.

    Args:
        stored: For each parameter, its values, its gradients and its states, [R, ...] each.
        run: The R members.
        rates: For each parameter, the learning rates [R], including multipliers and the schedule's factor.
        decays: For each parameter, the weight decays [R].
        steps: For each parameter, the numbers of steps [R], including this one.
        takes_R: True for members that take the step; None for all. The other members do not change.
    """
    power_R = run.vectors["beta2_decay"][:, 0]
    for (values, gradient, *state), lr_R, decay_R, steps_R in zip(stored, rates, decays, steps, strict=True):
        # Compute in float32 at least, because 1 - lr * weight_decay would round to 1 in half precision.
        precise = torch.promote_types(values.dtype, torch.float32)
        eps1 = torch.finfo(values.dtype).eps
        p, g, *before = (t.to(precise) for t in (values, gradient, *state))
        share = wide(steps_R**power_R, p)
        if len(before) == 2:
            row, column = (
                kept.lerp(g.square().mean(dim, keepdim=True), share) for kept, dim in zip(before, (-1, -2), strict=True)
            )
            after = [row, column]
            second = row @ column / row.mean(-2, keepdim=True).clamp(min=eps1)
        else:
            after = [before[0].lerp(g.square(), share)]
            (second,) = after
        direction = g * second.clamp(min=eps1 * eps1).rsqrt()
        rate_R = torch.minimum(lr_R, steps_R.rsqrt()) * _root_mean_square(p).clamp(min=_EPS2)
        rate_R = rate_R / (_root_mean_square(direction) / _D).clamp(min=1)
        moved = torch.addcmul(p * wide(1 - lr_R * decay_R, p), direction, wide(-rate_R, p))
        for target, value in zip((values, *state), (moved, *after), strict=True):
            target.copy_(value if takes_R is None else torch.where(wide(takes_R, value) > 0, value, target))


def _root_mean_square(t: Tensor) -> Tensor:
    """Return the root mean square of each member's values, [R]."""
    return t.square().flatten(1).mean(1).sqrt() if t.dim() > 1 else t.abs()
