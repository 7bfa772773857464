"""Updates on a CPU by torch's fused kernels, member by member.

A vectorized update passes over memory once for each of its operations; torch's fused kernel passes over it only once.
The kernel is called once for each member and pair of multipliers (of learning rate and weight decay), so no member's
values can reach another member. Parameters are in rows if each member's values fill one row of a matrix [K, N]
(`fusion.members.rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fusion.members.fused_model import FusedModel
from fusion.optim.optimizer_config import Hyperparameters

LEAST_PER_CALL = 2**11
"""Least number of elements in a call (of one member and pair of multipliers) for which the kernel is worth the call.

Measured with AdamW on one thread, for 32 members in rows. With 1,000 elements per member, the kernel has 0.9 times the
vectorized speed; with 4,000 elements 1.2 times, and with 16,000 elements 1.9 times.
"""

LEAST_PER_PARAMETER = 2**12
"""If parameters have at least this number of elements on average, the kernel takes them without moving them to rows.

Without rows, a call takes 1.6 us per parameter. Gathering gradients in rows takes 1.5 us for 4,000 elements, so rows
cost about as much at this size.
"""

Views = list[tuple[tuple[Tensor, ...], ...]]
"""The members' parts of tensors, indexed [member][role][parameter]. Roles are the parameter itself and its moments."""


@dataclass(frozen=True)
class Alike:
    """Parameters with equal multipliers and step counts in each of R members, and the views of them.

    Attributes:
        names: Names of the parameters.
        column: Column of tables [K, P] with the parameters' common settings.
        views: Views of the parameters and their moments. SGD has no moment or one, Adam has two.
    """

    names: Sequence[str]
    column: int
    views: Views


def views_of(stored: Sequence[Sequence[Tensor]]) -> Views:
    """Return views `[member][role][parameter]` of the tensors `stored[role][parameter]`, [R, ...] each."""
    return list(zip(*(list(zip(*(t.detach().unbind() for t in of_role))) for of_role in stored)))


def takes(tensors: Sequence[Tensor]) -> bool:
    """Return whether torch's fused kernels for CPUs support the device and dtype of these tensors."""
    return all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64) for t in tensors)


def takes_in_place(fused: FusedModel, parameters: Sequence[Tensor]) -> bool:
    """Return whether torch's kernels can update stacked parameters where they are, faster than in rows."""
    sizes = sum(p.numel() for p in parameters) // fused.K
    large = sizes >= LEAST_PER_PARAMETER * len(parameters) or fused.K == 1
    return fused.updated_in_turn and large and takes(parameters) and all(p.is_contiguous() for p in parameters)


def update(
    hp: Hyperparameters, tensors: Sequence[tuple[Tensor, ...]], lr: float, decay: float, step: float, factor: float
) -> None:
    """Update parameters of one member by torch's fused kernel, in place.

    Args:
        hp: The member's hyperparameters; `lr` and `decay` replace its learning rate and weight decay.
        tensors: Indexed [role][parameter]; the roles are the parameter, its gradient and its moments.
        lr: Learning rate, including the multiplier and the schedule's factor.
        decay: Weight decay, including the multiplier.
        step: Number of steps, including this one.
        factor: The schedule's factor, for an independent weight decay.
    """
    if hp.independent_weight_decay:
        # Divide by lr, because the kernel multiplies the decay by lr. Only the schedule's factor remains.
        decay = decay * factor / lr if lr > 0 else 0.0
    parameters, gradients, *moments = tensors
    if hp.kind == "sgd":
        torch._fused_sgd_(
            parameters,
            gradients,
            moments[0] if hp.momentum else [],
            weight_decay=decay,
            momentum=hp.momentum,
            lr=lr,
            dampening=hp.dampening,
            nesterov=hp.nesterov,
            maximize=False,
            is_first_step=step == 1,
        )
        return
    kernel = torch._fused_adam_ if hp.kind == "adam" else torch._fused_adamw_
    kernel(
        parameters,
        gradients,
        moments[0],
        moments[1],
        [],
        [_count(step)] * len(parameters),
        lr=lr,
        beta1=hp.beta1,
        beta2=hp.beta2,
        weight_decay=decay,
        eps=hp.eps,
        amsgrad=False,
        maximize=False,
    )


@lru_cache(maxsize=16)
def _count(step: float) -> Tensor:
    return torch.tensor(step, dtype=torch.float32)
