"""The hyperparameters of one optimizer, read from a configuration in one place for fused and single training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from fusion.checks import check_mapping, require
from fusion.hyperparameters import (
    KEYS,
    MUON_ORIGINAL,
    OPTIMIZERS,
    OWN,
    VECTORIZED,
    check,
    default,
    is_read,
    own_arguments,
    read,
)

__all__ = ["OPTIMIZERS", "Hyperparameters"]


@dataclass(frozen=True)
class Hyperparameters:
    """One member's optimizer; ranges and defaults, which are those of `torch.optim`, stand in `fusion.hyperparameters`.

    Attributes:
        kind: Name of the optimizer; of one that `make` makes, that of the class it is of or is derived from, or "own".
        lr: Learning rate.
        momentum: That of SGD and Muon.
        dampening: SGD's: the gradient enters the momentum times `1 - dampening`.
        nesterov: Likewise; SGD's needs momentum > 0 and dampening 0.
        weight_decay: Added to the gradient by sgd and adam (coupled), taken off the weights by adamw and muon.
            None stands for the optimizer's default.
        beta1: Decay rate of the first moment of Adam, and of the AdamW beside Muon.
        beta2: Decay rate of its second moment.
        eps: Added to the root of the second moment.
        independent_weight_decay: AdamW takes `weight_decay` times the schedule's factor off the weights, not
            times the learning rate, so that the two can be tuned apart (Wortsman et al. 2023,
            arXiv:2309.14322).
        adjust_lr_fn: How Muon's learning rate depends on a matrix's shape, as in `torch.optim.Muon`.
        options: Of an optimizer that is not vectorized, its keyword arguments besides `lr`, torch's defaults left
            out; the fields above stay as they are.
        make: What makes the optimizer from parameter groups, `lr` and the options; torch's class of that name if None.
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
    adjust_lr_fn: str = KEYS["adjust_lr_fn"].defaults["muon"]
    options: tuple[tuple[str, Any], ...] = ()
    make: Callable[..., torch.optim.Optimizer] | None = None

    def __post_init__(self) -> None:
        if not self.is_vectorized:
            check({"optimizer": self.make or self.kind, "lr": self.lr})
            return
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", default("weight_decay", {"optimizer": self.kind}))
        own = fields(self)[1:-2]
        config = {"optimizer": self.kind} | {f.name: getattr(self, f.name) for f in own}
        check(config)
        for f in own:
            allowed = config[f.name] == f.default or is_read(f.name, config)
            require(allowed, f.name, config[f.name], f"left out: {self.kind} does not read it")

    @property
    def is_vectorized(self) -> bool:
        """Whether such members are updated together, by rules of this package; else torch updates each by itself."""
        return self.make is None and self.kind in VECTORIZED

    def rule(self, matrix: bool) -> str:
        """Name of the rule that updates a parameter, by which multipliers are looked up.

        Args:
            matrix: Whether the parameter is one of those that Muon updates, if this is Muon.
        """
        if self.kind != "muon":
            return self.kind
        if not matrix:
            return "adamw"
        return MUON_ORIGINAL if self.adjust_lr_fn == "original" else "muon"

    @property
    def decay(self) -> float:
        """The weight decay, torch's default filled in; 0 of members that torch updates, which has theirs."""
        return self.weight_decay or 0.0

    def made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of a member that is not vectorized.

        Args:
            groups: Of parameters, with their learning rates.

        Raises:
            ValueError: where a function of the user's makes no optimizer, or one whose step needs a closure.
        """
        optimizer: torch.optim.Optimizer = (self.make or _TORCH[self.kind])(groups, lr=self.lr, **dict(self.options))
        rule = "one that makes a torch optimizer whose step needs no closure"
        holds = isinstance(optimizer, torch.optim.Optimizer) and _steps_alone(optimizer)
        require(holds, "optimizer", optimizer if self.make is None else self.make, rule)
        return optimizer

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
        kind = read(config, "optimizer")
        if not isinstance(kind, str):
            lr, options = read(config, "lr"), tuple(own_arguments(config).items())
            known = _known_class(cls(OWN, lr, options=options, make=kind))
            return cls(known, lr, options=options, make=kind)
        named = [name for name, key in KEYS.items() if key.reader == "optimizer" and name != "optimizer"]
        if kind in VECTORIZED:
            return cls(kind, **{name: read(config, name) for name in named if is_read(name, config)})
        given = {name: read(config, name) for name in named if name in config and is_read(name, config)}
        lr = given.pop("lr")
        if "beta1" in given or "beta2" in given:
            given["betas"] = tuple(given.pop(name, default(name, config)) for name in ("beta1", "beta2"))
        return cls(kind, lr, options=tuple(given.items()))


_TORCH = {cls.__name__.lower(): cls for cls in vars(torch.optim).values() if isinstance(cls, type)}


def _steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return False
    return True


def _known_class(hp: Hyperparameters) -> str:
    """The name of the class that a function's optimizers are of, or of the first with a name that theirs is of."""
    # Functions may tell matrices from vectors, and have a rule for either.
    made = hp.made([{"params": [torch.nn.Parameter(torch.zeros(1, *more)) for more in ((1,), ())], "lr": hp.lr}])
    names = (cls.__name__.lower() for cls in type(made).__mro__ if cls.__module__.startswith("torch.optim"))
    return next((name for name in names if name in OPTIMIZERS), OWN)
