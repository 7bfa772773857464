"""The hyperparameters of one optimizer, read from a configuration in one place for fused and single training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from fusion.argument_checks import check_mapping, require
from fusion.keys import (
    KEYS,
    MUON_ORIGINAL,
    OPTIMIZERS,
    OWN,
    SCHEDULE_FREE,
    VECTORIZED,
    check,
    check_class,
    default,
    is_read,
    own_arguments,
    read,
)
from fusion.optim.lion import Lion
from fusion.optim.prodigy import Prodigy
from fusion.optim.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD, has_modes


@dataclass(frozen=True)
class Hyperparameters:
    """One member's optimizer. `fusion.keys` has ranges and defaults; most are those of `torch.optim`.

    Attributes:
        kind: Name of the optimizer. For one that `make` makes, the name of its class or base class here, or "own".
        lr: Learning rate.
        momentum: Momentum of SGD, Muon and RMSprop. With Schedule-Free SGD, the average's share in the weights at which
            gradients are taken.
        dampening: Dampening of SGD: the gradient enters the momentum times `1 - dampening`.
        nesterov: Nesterov momentum of SGD and Muon; that of SGD needs momentum > 0 and dampening 0.
        weight_decay: Taken off the weights by adamw, adafactor, lion, muon, prodigy and Schedule-Free optimizers
            (decoupled), added to the gradient by the others. None stands for the optimizer's default.
        beta1: Decay rate of the first moment of Adam and its kin, and of the AdamW beside Muon. With Lion, the share of
            the momentum in the direction of a step. With Schedule-Free AdamW, as `momentum` of Schedule-Free SGD.
        beta2: Decay rate of the second moment, likewise; with Lion, of the momentum.
        beta2_decay: Exponent of the step in the share of a new gradient in Adafactor's second moment.
        d_coef: Multiplies Prodigy's estimate where it grows.
        d0: Prodigy's first estimate.
        use_bias_correction: Prodigy corrects the moments for their zeros at the beginning, as Adam does.
        safeguard_warmup: Prodigy leaves the learning rate out of the estimate's denominator.
        alpha: Decay rate of RMSprop's second moment.
        eps: Added to the root of the second moment.
        independent_weight_decay: AdamW takes `weight_decay` times the schedule's factor off the weights, instead of
            times the learning rate. So the two can be tuned apart (Wortsman et al. 2023, arXiv:2309.14322).
        adjust_lr_fn: How Muon's learning rate depends on a matrix's shape, as in `torch.optim.Muon`.
        options: Keyword arguments besides `lr` of an optimizer that is not vectorized, without torch's defaults; the
            fields from `momentum` on keep their defaults.
        make: Function that makes the optimizer from parameter groups, `lr` and the options. If None, it is torch's
            class of the name `kind`.
    """

    kind: str
    lr: float
    momentum: float = KEYS["momentum"].defaults["sgd"]
    dampening: float = KEYS["dampening"].defaults["sgd"]
    nesterov: bool = KEYS["nesterov"].defaults["sgd"]
    weight_decay: float | None = None
    beta1: float = KEYS["beta1"].defaults["adamw"]
    beta2: float = KEYS["beta2"].defaults["adamw"]
    beta2_decay: float = KEYS["beta2_decay"].defaults["adafactor"]
    d_coef: float = KEYS["d_coef"].defaults["prodigy"]
    d0: float = KEYS["d0"].defaults["prodigy"]
    use_bias_correction: bool = KEYS["use_bias_correction"].defaults["prodigy"]
    safeguard_warmup: bool = KEYS["safeguard_warmup"].defaults["prodigy"]
    alpha: float = KEYS["alpha"].defaults["rmsprop"]
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
        """Return whether rules of this package update such members together; else torch updates each by itself."""
        return self.make is None and self.kind in VECTORIZED

    @property
    def decouples(self) -> bool:
        """Return whether the weight decay is taken off the weights, instead of being added to the gradient."""
        return self.kind in ("adafactor", "adamw", "lion", "muon", "prodigy", *SCHEDULE_FREE)

    @property
    def average_share(self) -> float:
        """Return a Schedule-Free average's share in the weights at which gradients are taken."""
        return self.momentum if self.kind == "schedule_free_sgd" else self.beta1

    @property
    def has_modes(self) -> bool:
        """Return whether the weights to evaluate are others than those that the optimizer trains."""
        return self.kind in SCHEDULE_FREE if self.make is None else has_modes(_tried(self))

    def rule(self, matrix: bool) -> str:
        """Return the name of the rule that updates a parameter; multipliers are looked up by it.

        Args:
            matrix: True for a parameter that Muon updates, if this is Muon.
        """
        if self.kind != "muon":
            return self.kind
        if not matrix:
            return "adamw"
        return MUON_ORIGINAL if self.adjust_lr_fn == "original" else "muon"

    @property
    def decay(self) -> float:
        """Return the weight decay, by default torch's; 0 for members that torch updates, because torch has theirs."""
        return self.weight_decay or 0.0

    def as_torch(self, groups: list[dict[str, Any]], **more: Any) -> torch.optim.Optimizer:
        """Make torch's optimizer of a member that is vectorized; Muon is made by `MuonWithAdamW`."""
        names = {"momentum", "dampening", "nesterov", "alpha", "beta2_decay", "eps"} | _OF_PRODIGY
        read_ = {name: getattr(self, name) for name in names if self.kind in KEYS[name].defaults}
        if self.kind in KEYS["beta1"].defaults:
            read_["betas"] = (self.beta1, self.beta2)
        optimizer: torch.optim.Optimizer = _TORCH[self.kind](groups, lr=self.lr, **read_, **more)
        return optimizer

    def made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer of a member that is not vectorized; if it has modes, it is in that of training.

        Args:
            groups: Of parameters, with their learning rates.

        Raises:
            ValueError: if a user's function makes no optimizer, or one whose step needs a closure.
        """
        optimizer: torch.optim.Optimizer = (self.make or _TORCH[self.kind])(groups, lr=self.lr, **dict(self.options))
        rule = "one that makes a torch optimizer whose step needs no closure"
        holds = isinstance(optimizer, torch.optim.Optimizer) and _steps_alone(optimizer)
        require(holds, "optimizer", optimizer if self.make is None else self.make, rule)
        if has_modes(optimizer):
            optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Hyperparameters:
        """Read `optimizer` and, of the fields above, those that this optimizer has; other keys are ignored.

        Raises:
            ValueError: if `lr` is missing, or a value breaks its rule.

        >>> Hyperparameters.from_config({"optimizer": "sgd", "lr": 0.1, "width": 64}).lr
        0.1
        """
        check_mapping("config", config)
        if "lr" not in config:
            raise ValueError("`lr`, the learning rate, is left out, but must be given")
        kind = read(config, "optimizer")
        check_class(config)
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


_OF_PRODIGY = {"d_coef", "d0", "use_bias_correction", "safeguard_warmup"}
WRITTEN: dict[str, type[torch.optim.Optimizer]] = {
    "lion": Lion,
    "prodigy": Prodigy,
    "schedule_free_adamw": ScheduleFreeAdamW,
    "schedule_free_sgd": ScheduleFreeSGD,
}
"""The classes of optimizers that torch does not have."""

_TORCH = {cls.__name__.lower(): cls for cls in vars(torch.optim).values() if isinstance(cls, type)} | WRITTEN


def _steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return False
    return True


def _tried(hp: Hyperparameters) -> torch.optim.Optimizer:
    """Make the optimizer of a function for parameters that nobody trains."""
    # A function may have different rules for matrices and vectors, so it gets both.
    return hp.made([{"params": [torch.nn.Parameter(torch.zeros(1, *more)) for more in ((1,), ())], "lr": hp.lr}])


def _known_class(hp: Hyperparameters) -> str:
    """Return the name of the class of a function's optimizers, or of its first base class with a name here."""
    names = (cls.__name__.lower() for cls in type(_tried(hp)).__mro__ if cls.__module__.startswith("torch.optim"))
    return next((name for name in names if name in OPTIMIZERS), OWN)
