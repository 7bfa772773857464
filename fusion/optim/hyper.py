"""The hyperparameters of one optimizer, read from a configuration in one place for fused and single training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fusion.checks import check_mapping, require
from fusion.keys import KEYS, OPTIMIZERS, check, default, is_read, read

__all__ = ["OPTIMIZERS", "Hyperparameters"]


@dataclass(frozen=True)
class Hyperparameters:
    """One member's optimizer; ranges and defaults, which are those of `torch.optim`, stand in `fusion.keys`.

    Attributes:
        kind: "sgd", "adam" or "adamw".
        lr: Learning rate.
        momentum: SGD's momentum.
        dampening: SGD's: the gradient enters the momentum times `1 - dampening`.
        nesterov: SGD's; needs momentum > 0 and dampening 0.
        weight_decay: Added to the gradient by sgd and adam (coupled), taken off the weights by adamw. None
            stands for the optimizer's default.
        beta1: Decay rate of Adam's first moment.
        beta2: Decay rate of its second moment.
        eps: Added to the root of the second moment.
        independent_weight_decay: AdamW takes `weight_decay` times the schedule's factor off the weights, not
            times the learning rate, so that the two can be tuned apart (Wortsman et al. 2023,
            arXiv:2309.14322).
    """

    kind: str
    lr: float
    momentum: float = KEYS["momentum"].defaults["sgd"]
    dampening: float = KEYS["dampening"].defaults["sgd"]
    nesterov: bool = KEYS["nesterov"].defaults["sgd"]
    weight_decay: float | None = None
    beta1: float = KEYS["beta1"].defaults["adamw"]
    beta2: float = KEYS["beta2"].defaults["adamw"]
    eps: float = KEYS["eps"].defaults["adamw"]
    independent_weight_decay: bool = KEYS["independent_weight_decay"].defaults["adamw"]

    def __post_init__(self) -> None:
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", default("weight_decay", {"optimizer": self.kind}))
        config = {"optimizer": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)[1:]}
        check(config)
        for f in fields(self)[1:]:
            allowed = config[f.name] == f.default or is_read(f.name, config)
            require(allowed, f.name, config[f.name], f"left out: {self.kind} does not read it")

    @property
    def decay(self) -> float:
        """The weight decay, torch's default filled in."""
        assert self.weight_decay is not None
        return self.weight_decay

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Hyperparameters:
        """Read `optimizer` and, of the fields above, those that this optimizer has; other keys are ignored.

        Raises:
            ValueError: where `lr` is missing, or a value breaks its rule.

        >>> Hyperparameters.from_config({"optimizer": "sgd", "lr": 0.1, "width": 64}).lr
        0.1
        """
        check_mapping("config", config)
        if "lr" not in config:
            raise ValueError("`lr`, the learning rate, is left out, but must be given")
        given = [f.name for f in fields(cls)[1:] if f.name in config and is_read(f.name, config)]
        return cls(kind=read(config, "optimizer"), **{name: read(config, name) for name in given})
