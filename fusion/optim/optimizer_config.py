"""The hyperparameters of one member's optimizer, read from a configuration; fused and single training share them."""

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
    """The settings of one member's optimizer. `fusion.keys` has their ranges and defaults, most of them torch's.

    Attributes:
        kind: Name of the optimizer. If `make` makes it, the name of its class or base class; "own" if these have none.
        lr: Learning rate.
        momentum: Momentum of SGD, Muon and RMSprop. With Schedule-Free SGD, the average's share in the weights at which
            gradients are taken.
        dampening: SGD multiplies the gradient by `1 - dampening` before it is added to the momentum.
        nesterov: Nesterov momentum of SGD and Muon; SGD then needs momentum > 0 and dampening 0.
        weight_decay: Decoupled in adamw, adafactor, lion, muon, prodigy and Schedule-Free optimizers. The others add it
            times the weight to the gradient. None stands for the optimizer's default.
        beta1: Decay rate of the first moment in Adam and its variants, and in the AdamW part of Muon. With Lion, the
            momentum's share in the direction of a step. With Schedule-Free AdamW, the share that is `momentum` in
            Schedule-Free SGD.
        beta2: Decay rate of the second moment in the same optimizers. With Lion, the decay rate of the momentum.
        beta2_decay: Adafactor gives a new squared gradient the share `step ** beta2_decay` in its second moment.
        d_coef: Multiplies Prodigy's estimate when it grows.
        d0: Prodigy's first estimate.
        use_bias_correction: If True, Prodigy corrects the moments for their start at zero, as Adam does.
        safeguard_warmup: If True, Prodigy leaves the learning rate out of the estimate's denominator.
        alpha: Decay rate of RMSprop's second moment.
        eps: Added to the root of the second moment.
        independent_weight_decay: If True, AdamW multiplies the weight decay by the schedule's factor instead of the
            learning rate. The two can then be tuned separately (Wortsman et al. 2023, arXiv:2309.14322).
        adjust_lr_fn: How Muon's learning rate depends on a matrix's shape, as in `torch.optim.Muon`.
        options: Keyword arguments besides `lr` of an optimizer that is not vectorized, if they are given. The fields
            from `momentum` on then keep their defaults.
        make: A user's function that makes the optimizer from parameter groups, `lr` and the options. If None, torch's
            class with the name `kind` is used.
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
        """Return whether this package updates members with this optimizer together; else torch updates each alone."""
        return self.make is None and self.kind in VECTORIZED

    @property
    def decouples(self) -> bool:
        """Return whether the weight decay is decoupled: it shrinks the weights, and is not added to the gradient."""
        return self.kind in ("adafactor", "adamw", "lion", "muon", "prodigy", *SCHEDULE_FREE)

    @property
    def average_share(self) -> float:
        """Return the share of a Schedule-Free average in the weights at which gradients are taken."""
        return self.momentum if self.kind == "schedule_free_sgd" else self.beta1

    @property
    def has_modes(self) -> bool:
        """Return whether the optimizer evaluates other weights than it trains; `train()` and `eval()` switch them."""
        return self.kind in SCHEDULE_FREE if self.make is None else has_modes(_tried(self))

    def rule(self, matrix: bool) -> str:
        """Return the name of a parameter's update rule, which is the key of its multipliers.

        Args:
            matrix: True if Muon updates the parameter; ignored for other optimizers.
        """
        if self.kind != "muon":
            return self.kind
        if not matrix:
            return "adamw"
        return MUON_ORIGINAL if self.adjust_lr_fn == "original" else "muon"

    @property
    def decay(self) -> float:
        """Return the weight decay; 0 if torch updates the member, because torch then applies the decay itself."""
        return self.weight_decay or 0.0

    def as_torch(self, groups: list[dict[str, Any]], **more: Any) -> torch.optim.Optimizer:
        """Make the `torch.optim.Optimizer` that a vectorized member would have alone. For Muon, use `MuonWithAdamW`."""
        names = {"momentum", "dampening", "nesterov", "alpha", "beta2_decay", "eps"} | _OF_PRODIGY
        read_ = {name: getattr(self, name) for name in names if self.kind in KEYS[name].defaults}
        if self.kind in KEYS["beta1"].defaults:
            read_["betas"] = (self.beta1, self.beta2)
        optimizer: torch.optim.Optimizer = _TORCH[self.kind](groups, lr=self.lr, **read_, **more)
        return optimizer

    def made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer of a member that is not vectorized; if it has modes, it is in training mode.

        Args:
            groups: Parameter groups with their learning rates.

        Raises:
            ValueError: if a user's function returns no optimizer, or one whose step needs a closure.
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
        """Read the key `optimizer` and the settings that this optimizer has; other keys are ignored.

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
"""Optimizers that torch does not have, and their classes in this package."""

_TORCH = {cls.__name__.lower(): cls for cls in vars(torch.optim).values() if isinstance(cls, type)} | WRITTEN


def _steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return False
    return True


def _tried(hp: Hyperparameters) -> torch.optim.Optimizer:
    """Make the optimizer of a user's function for dummy parameters, to inspect it."""
    # Pass a matrix and a vector, because the function may treat them differently.
    return hp.made([{"params": [torch.nn.Parameter(torch.zeros(1, *more)) for more in ((1,), ())], "lr": hp.lr}])


def _known_class(hp: Hyperparameters) -> str:
    """Return the name in `OPTIMIZERS` of the class, or first base class, of the optimizer that a user's function makes.

    Return `OWN` if none of these classes has a name there.
    """
    names = (cls.__name__.lower() for cls in type(_tried(hp)).__mro__ if cls.__module__.startswith("torch.optim"))
    return next((name for name in names if name in OPTIMIZERS), OWN)
