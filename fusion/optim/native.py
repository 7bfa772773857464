"""On a CPU, torch's own one-pass kernels, member by member.

A vectorized update reads and writes memory once for each of its operations. Torch's fused kernel passes over memory
once. It is called once for each member and each pair of multipliers, so values of one member cannot reach another.
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
"""Elements of a member and of a pair of multipliers from which a call costs less than the passes that it saves.

Measured on one thread, AdamW, 32 members of 1,000, 4,000 and 16,000 elements in rows: 0.9, 1.2 and 1.9 of the
vectorized speed.
"""

LEAST_PER_PARAMETER = 2**12
"""Elements of a parameter, on average, from which the kernel takes parameters where they lie.

A call then takes 1.6 us for each of them. Gathering their gradients in rows first takes 1.5 us for 4,000 elements.
"""

Views = list[tuple[tuple[Tensor, ...], ...]]
"""The members' parts of tensors, [member][role][parameter]; the first role is the parameter."""


@dataclass(frozen=True)
class Alike:
    """Parameters that have equal multipliers and step counts in each of R members, with their views, made once.

    Attributes:
        names: Of the parameters.
        column: Of their settings in [K, P].
        views: Of the parameters and their moments: none, one (SGD) or two (Adam).
    """

    names: Sequence[str]
    column: int
    views: Views


def views_of(stored: Sequence[Sequence[Tensor]]) -> Views:
    """Return the members' parts of tensors [role][parameter], [R, ...] each."""
    return list(zip(*(list(zip(*(t.detach().unbind() for t in of_role))) for of_role in stored)))


def takes(tensors: Sequence[Tensor]) -> bool:
    """Return whether the kernels take tensors."""
    return all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64) for t in tensors)


def takes_in_place(fused: FusedModel, parameters: Sequence[Tensor]) -> bool:
    """Return whether the kernels take a model's stacked parameters [K, ...] where they lie, and are worth it."""
    sizes = sum(p.numel() for p in parameters) // fused.K
    large = sizes >= LEAST_PER_PARAMETER * len(parameters) or fused.K == 1
    return fused.updated_in_turn and large and takes(parameters) and all(p.is_contiguous() for p in parameters)


def update(
    hp: Hyperparameters, tensors: Sequence[tuple[Tensor, ...]], lr: float, decay: float, step: float, factor: float
) -> None:
    """Update parameters of one member.

    Args:
        hp: Its hyperparameters; learning rate and weight decay are replaced.
        tensors: [role][parameter]; the roles are the parameter, its gradient and its moments.
        lr: Learning rate, the multiplier and the schedule's factor included.
        decay: Weight decay, the multiplier included.
        step: Steps so far, the coming one included.
        factor: The schedule's factor; an independent weight decay follows it alone.
    """
    if hp.independent_weight_decay:
        # The kernel takes lr * decay off.
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
