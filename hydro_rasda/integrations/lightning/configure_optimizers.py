"""Reads the optimizer and the schedule of a module from the return value of `configure_optimizers`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fusion.keys import KEYS
from hydro_rasda.problem.objective import OptimizerSettings

_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
}
_SAME = ("momentum", "dampening", "nesterov", "betas", "eps")
_OFF = ("amsgrad", "maximize", "decoupled_weight_decay")


class Unfollowed(ValueError):
    """Raised for a part of a module that `tune` cannot follow."""


@dataclass(frozen=True)
class Recorded:
    """A `schedule(step, steps)` from the recorded factors of a scheduler, one for each step or epoch."""

    factors: tuple[float, ...]

    def __call__(self, step: int, steps: int) -> float:
        return self.factors[min(step * len(self.factors) // steps, len(self.factors) - 1)]


def optimizer_settings(
    module: LightningModule, config: Mapping[str, Any], epochs: int, steps: int
) -> OptimizerSettings:
    """Return the settings by which a module's own optimizer updates its parameters.

    Args:
        config: The trial's configuration; its keys for optimizer and schedule are replaced.

    Raises:
        Unfollowed: if the optimizer is none of SGD, Adam and AdamW, or if there are several. Also if the scheduler
            depends on metrics, changes momenta, or changes groups by different factors.
    """
    known = {"estimated_stepping_batches": steps, "max_epochs": epochs, "max_steps": -1}
    with attached(module, "configure_optimizers", **known):
        optimizer, scheduler, interval, frequency = _parts(module.configure_optimizers())
    kind, groups = _KINDS.get(type(optimizer)), optimizer.param_groups
    if kind is None:
        raise Unfollowed(f"{type(optimizer).__name__}: SGD, Adam and AdamW are followed")
    own = {key: value for key, value in config.items() if key not in OF_OPTIMIZERS}
    own |= {"optimizer": kind, "warmup_epochs": 0.0, **_common(groups, kind)}
    names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
    decays = [float(group["weight_decay"]) for group in groups]
    if not max(rates):
        raise Unfollowed("all learning rates are 0")
    own |= {"lr": max(rates), "weight_decay": max(decays)}
    lr_factors, decay_factors, left = dict[str, float](), dict[str, float](), set(names.values())
    for group, rate, decay in zip(groups, rates, decays):
        for parameter in group["params"]:
            if id(parameter) in names:
                name = names[id(parameter)]
                left.discard(name)
                lr_factors[name] = rate / max(rates)
                decay_factors[name] = decay / max(decays) if max(decays) else 1.0
    if left:
        raise Unfollowed(f"no group has the parameter {min(left)!r}: freeze it (`requires_grad_(False)`)")
    if scheduler is not None:
        own["schedule"] = Recorded(tuple(_factors(optimizer, scheduler, rates, interval, frequency, epochs, steps)))
    return OptimizerSettings(own, _others(lr_factors), _others(decay_factors))


OF_OPTIMIZERS = {name for name, key in KEYS.items() if key.reader in ("optimizer", "schedule")}
"""Keys of a configuration that a module's own optimizer and schedule replace."""


def _others(factors: Mapping[str, float]) -> dict[str, float]:
    return {name: factor for name, factor in factors.items() if factor != 1.0}


class _KnownOfTrainer(SimpleNamespace):
    """A stand-in for the trainer, with the few attributes that one of a module's methods may read."""

    global_rank = local_rank = 0
    logger, loggers = None, ()

    def __init__(self, method: str, **known: Any) -> None:
        super().__init__(**known)
        self._method = method

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(name for name in vars(self) if not name.startswith("_"))
        told = f"{self._method}() asks for `trainer.{name}`, but here it can only ask for {known}"
        # `LightningModule` has properties of these names, in which an AttributeError would lose its text.
        raise Unfollowed(told) if name in ("current_epoch", "global_step") else AttributeError(told)


@contextmanager
def attached(module: LightningModule, method: str, **known: Any) -> Iterator[None]:
    """Give a module a stand-in trainer with the attributes `known`, inside the context.

    Reading `current_epoch` or `global_step` raises Unfollowed.
    """
    before = vars(module)["_trainer"]
    vars(module)["_trainer"] = _KnownOfTrainer(method, **known)
    try:
        yield
    finally:
        vars(module)["_trainer"] = before


def _parts(configured: Any) -> tuple[torch.optim.Optimizer, LRScheduler | None, str, int]:
    """Split the return value of `configure_optimizers` into optimizer, scheduler, interval and frequency."""
    optimizers, schedulers = configured, None
    if isinstance(configured, Mapping):
        optimizers, schedulers = configured.get("optimizer"), configured.get("lr_scheduler")
    elif isinstance(configured, tuple | list) and len(configured) == 2 and isinstance(configured[0], tuple | list):
        optimizers, schedulers = configured
    optimizer, scheduler = _one("optimizers", optimizers), _one("schedulers", schedulers)
    if isinstance(optimizer, Mapping):
        return _parts(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Unfollowed(f"configure_optimizers() returns {type(optimizer).__name__}, no optimizer")
    interval, frequency = "epoch", 1
    if isinstance(scheduler, Mapping):
        interval, frequency = scheduler.get("interval") or "epoch", scheduler.get("frequency", 1)
        if scheduler.get("scheduler") is None or interval not in ("step", "epoch") or not frequency:
            told = "'scheduler', an 'interval' of 'step' or 'epoch', and a 'frequency' of 1 or more"
            raise Unfollowed(f"a dict of a scheduler, {scheduler!r}, but it must have {told}")
        scheduler = scheduler["scheduler"]
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler | None):
        raise Unfollowed(f"{type(scheduler).__name__}: it is no function of the step")
    return optimizer, scheduler, interval, frequency


def _one(what: str, given: Any) -> Any:
    if not isinstance(given, tuple | list):
        return given
    if len(given) > 1:
        raise Unfollowed(f"configure_optimizers() returns {len(given)} {what}: one is followed")
    return given[0] if given else None


def _common(groups: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    first = groups[0]
    for name in _SAME:
        if any(group.get(name) != first.get(name) for group in groups):
            raise Unfollowed(f"groups with different {name}: learning rates and weight decays may differ")
    on = [name for name in _OFF if any(group.get(name) for group in groups)]
    if on and not (kind == "adamw" and on == ["decoupled_weight_decay"]):
        raise Unfollowed(f"{on[0]}=True")
    if kind == "sgd":
        return {name: first[name] for name in ("momentum", "dampening", "nesterov")}
    return {"beta1": first["betas"][0], "beta2": first["betas"][1], "eps": first["eps"]}


def _factors(
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    rates: list[float],
    interval: str,
    frequency: int,
    epochs: int,
    steps: int,
) -> Iterator[float]:
    """Run the scheduler through, and yield the factor of the learning rates in each step or epoch.

    With a `frequency`, Lightning counts the steps of each epoch from 0, and so does this function.
    """
    period = steps // epochs if interval == "step" else epochs
    fixed = [{name: group.get(name) for name in ("momentum", "betas")} for group in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scheduler warns that no optimizer step came before it
        for at in range(steps if interval == "step" else epochs):
            if at and ((at - 1) % period + 1) % frequency == 0:
                scheduler.step()
            pairs = [(group["lr"], rate) for group, rate in zip(optimizer.param_groups, rates)]
            factors = {lr / rate for lr, rate in pairs if rate}
            if max(factors) - min(factors) > 1e-9 * max(factors) or any(lr for lr, rate in pairs if not rate):
                raise Unfollowed(f"{type(scheduler).__name__}: groups change by different factors")
            if any(group.get(name) != of[name] for group, of in zip(optimizer.param_groups, fixed) for name in of):
                raise Unfollowed(f"{type(scheduler).__name__}: it changes momenta, too (`cycle_momentum=False`)")
            yield max(factors)
