"""Functions and classes that make a `FusedOptimizer`, from the members' configurations or from vectors of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from fusion.argument_checks import check_each, require
from fusion.keys import checked_parts, lr_factors, names_of_parts, own_parts
from fusion.members.fused_model import FusedModel, check_fused
from fusion.members.member_indices import member_vector
from fusion.optim.fused import FusedOptimizer
from fusion.optim.fused_parts import FusedByPart
from fusion.optim.muon import matrices_of
from fusion.optim.optimizer_config import Hyperparameters
from fusion.optim.torch_optimizer import Multipliers

Result = TypeVar("Result")
PerMember = float | Sequence[float] | Tensor
"""One number for all members, or one for each: [K]."""


def fused_optimizer(
    fused: FusedModel,
    configs: Sequence[Mapping[str, Any]],
    *,
    lr_multipliers: Multipliers | None = None,
    weight_decay_multipliers: Multipliers | None = None,
) -> FusedOptimizer:
    """Make one optimizer for members whose configurations may name different optimizers.

    Args:
        configs: K configurations, with the keys of `Hyperparameters.from_config`. Parts of a model may have their own
            learning rates (`lr.PART`) and optimizers (`optimizer.PART`, `beta1.PART`), see `fusion.keys.part_settings`.
            In all members, the same parts must have their own optimizer. Put members with the same optimizer side by
            side, because adjacent ones are updated together.
        lr_multipliers: `lr_multipliers[optimizer][parameter]` is a factor of the learning rate, 1 if absent.
        weight_decay_multipliers: The same for the weight decay.

    Raises:
        ValueError: for an unknown optimizer, part or parameter name, or a value out of range; the message names the
            member. Also if members have their own optimizers for different parts.
    """
    check_fused(fused)
    check_each("configs", configs, Mapping, fused.K)
    given = [_of_member(k, checked_parts, config) for k, config in enumerate(configs)]
    parts = own_parts(configs[0])
    for k, config in enumerate(configs):
        rule = f"of optimizers for the same parts as `configs[0]`, {parts}"
        require(own_parts(config) == parts, f"configs[{k}]", config, rule)
    learning = [name for name, p in {**fused.shared, **fused.stacked}.items() if p.requires_grad]
    names = names_of_parts(configs[0], learning) if parts else {"": learning}
    members = {part: [member(k, of[part]) for k, of in enumerate(given)] for part in names}
    matrices = frozenset[str]().union(*(matrices_of(fused, members[part], names[part]) for part in names))
    own = [lr_factors(config, learning, matrices) for config in configs]
    both = {"lr_multipliers": lr_multipliers, "weight_decay_multipliers": weight_decay_multipliers}
    made = {
        part: FusedOptimizer(fused, members[part], own, names=of if parts else None, **both)
        for part, of in names.items()
    }
    return FusedByPart(made) if parts else made[""]


class FusedSGD(FusedOptimizer):
    """`torch.optim.SGD` for K members. Each setting is one number for all members, or K numbers.

    Args:
        lr: Learning rates.
        momentum: Momenta.
        dampening: The gradient is multiplied by `1 - dampening` before it is added to the momentum.
        weight_decay: Coupled weight decay: a step adds `weight_decay` times the weight to the gradient.
        nesterov: If True, use Nesterov momentum; needs momentum > 0 and dampening 0.
        lr_multipliers: Parameter name -> factor of the learning rate, 1 if absent.
        weight_decay_multipliers: The same for the weight decay.
    """

    def __init__(
        self,
        fused: FusedModel,
        *,
        lr: PerMember,
        momentum: PerMember = 0.0,
        dampening: PerMember = 0.0,
        weight_decay: PerMember = 0.0,
        nesterov: bool | Sequence[bool] | Tensor = False,
        lr_multipliers: Mapping[str, float] | None = None,
        weight_decay_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        check_fused(fused)
        settings = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(
            fused,
            _members("sgd", fused.K, {**settings, "nesterov": nesterov}),
            lr_multipliers={"sgd": {} if lr_multipliers is None else lr_multipliers},
            weight_decay_multipliers={"sgd": {} if weight_decay_multipliers is None else weight_decay_multipliers},
        )


class _FusedAdam(FusedOptimizer):
    _kind: str

    def __init__(
        self,
        fused: FusedModel,
        *,
        lr: PerMember,
        betas: tuple[PerMember, PerMember] = (0.9, 0.999),
        eps: PerMember = 1e-8,
        weight_decay: PerMember | None = None,
        independent_weight_decay: bool | Sequence[bool] | Tensor = False,
        lr_multipliers: Mapping[str, float] | None = None,
        weight_decay_multipliers: Mapping[str, float] | None = None,
    ) -> None:
        check_fused(fused)
        require(isinstance(betas, tuple | list) and len(betas) == 2, "betas", betas, "two numbers, or lists of them")
        settings = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps}
        if weight_decay is not None:
            settings["weight_decay"] = weight_decay
        super().__init__(
            fused,
            _members(self._kind, fused.K, {**settings, "independent_weight_decay": independent_weight_decay}),
            lr_multipliers={self._kind: {} if lr_multipliers is None else lr_multipliers},
            weight_decay_multipliers={self._kind: {} if weight_decay_multipliers is None else weight_decay_multipliers},
        )


class FusedAdam(_FusedAdam):
    """`torch.optim.Adam` for K members. Each setting is one number for all members, or K numbers.

    Args:
        lr: Learning rates.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Coupled weight decay: a step adds `weight_decay` times the weight to the gradient.
        lr_multipliers: Parameter name -> factor of the learning rate, 1 if absent.
        weight_decay_multipliers: The same for the weight decay.
    """

    _kind = "adam"


class FusedAdamW(_FusedAdam):
    """`torch.optim.AdamW` for K members. Each setting is one number for all members, or K numbers.

    Args:
        lr: Learning rates.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay: a step subtracts `lr * weight_decay` times the weight; 0.01 by default.
        independent_weight_decay: If True, the weight decay is multiplied by the schedule's factor instead of the
            learning rate.
        lr_multipliers: Parameter name -> factor of the learning rate, 1 if absent.
        weight_decay_multipliers: The same for the weight decay.
    """

    _kind = "adamw"


def member(k: int, config: Mapping[str, Any]) -> Hyperparameters:
    """Read the hyperparameters of member `k` from its configuration; an error message names the member."""
    return _of_member(k, Hyperparameters.from_config, config)


def _of_member(k: int, read: Callable[[Mapping[str, Any]], Result], config: Mapping[str, Any]) -> Result:
    try:
        return read(config)
    except ValueError as error:
        raise ValueError(f"`configs[{k}]`: {error}") from None


def _members(kind: str, K: int, settings: Mapping[str, Any]) -> list[Hyperparameters]:
    flags = ("nesterov", "independent_weight_decay")
    columns = {name: member_vector(name, value, K, flags=name in flags).tolist() for name, value in settings.items()}
    columns |= {flag: [bool(value) for value in columns[flag]] for flag in flags if flag in columns}
    return [Hyperparameters(kind, **{name: column[k] for name, column in columns.items()}) for k in range(K)]
