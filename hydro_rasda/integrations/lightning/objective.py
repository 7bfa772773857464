"""A module's steps as an objective, whose logged values are the metrics, and its `configure_optimizers`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fusion.hyperparameters import KEYS
from fusion.width.microbatch import WEIGHT, is_weight
from hydro_rasda.data import Batch
from hydro_rasda.loss_weight import LOSS_WEIGHT, LossCalls
from hydro_rasda.objective import OptimizerSettings

_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
}
_SAME = ("momentum", "dampening", "nesterov", "betas", "eps")
_OFF = ("amsgrad", "maximize", "decoupled_weight_decay")


class Unfollowed(ValueError):
    """An optimizer or a scheduler that cannot be followed."""


@dataclass(frozen=True)
class Recorded:
    """A scheduler's factors, one for each step or epoch, as it gave them: `schedule(step, steps)`."""

    factors: tuple[float, ...]

    def __call__(self, step: int, steps: int) -> float:
        return self.factors[min(step * len(self.factors) // steps, len(self.factors) - 1)]


def optimizer_settings(
    module: LightningModule, config: Mapping[str, Any], epochs: int, steps: int
) -> OptimizerSettings:
    """How a module's own optimizer updates it.

    Args:
        config: The trial's; what the library reads of it for the optimizer is replaced.

    Raises:
        Unfollowed: if it has none of SGD, Adam and AdamW, more than one optimizer, or a scheduler that depends on
            metrics, changes momenta, or changes groups by different factors.
    """
    with _attached(module, epochs, steps):
        optimizer, scheduler, interval, frequency = _parts(module.configure_optimizers())
    kind, groups = _KINDS.get(type(optimizer)), optimizer.param_groups
    if kind is None:
        raise Unfollowed(f"{type(optimizer).__name__}: SGD, Adam and AdamW are followed")
    own = {key: value for key, value in config.items() if key not in _OF_OPTIMIZERS}
    own |= {"optimizer": kind, "warmup_epochs": 0.0, **_common(groups, kind)}
    names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
    rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
    decays = [float(group["weight_decay"]) for group in groups]
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


_OF_OPTIMIZERS = {name for name, key in KEYS.items() if key.reader in ("optimizer", "schedule")}


def _others(factors: Mapping[str, float]) -> dict[str, float]:
    return {name: factor for name, factor in factors.items() if factor != 1.0}


@contextmanager
def _attached(module: LightningModule, epochs: int, steps: int) -> Iterator[None]:
    """Give a module, for a while, what its schedulers may ask of a trainer."""
    known = SimpleNamespace(estimated_stepping_batches=steps, max_epochs=epochs, max_steps=-1)
    before = vars(module)["_trainer"]
    vars(module)["_trainer"] = known
    try:
        yield
    finally:
        vars(module)["_trainer"] = before


def _parts(configured: Any) -> tuple[torch.optim.Optimizer, LRScheduler | None, str, int]:
    """Optimizer, scheduler, its interval and frequency, of what Lightning allows `configure_optimizers` to return."""
    optimizers, schedulers = configured, None
    if isinstance(configured, Mapping):
        optimizers, schedulers = configured["optimizer"], configured.get("lr_scheduler")
    elif isinstance(configured, tuple | list) and len(configured) == 2 and isinstance(configured[0], tuple | list):
        optimizers, schedulers = configured
    optimizer, scheduler = _one("optimizers", optimizers), _one("schedulers", schedulers)
    if isinstance(optimizer, Mapping):
        return _parts(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Unfollowed(f"configure_optimizers() returns {type(optimizer).__name__}, no optimizer")
    interval, frequency = "epoch", 1
    if isinstance(scheduler, Mapping):
        interval, frequency = scheduler.get("interval", "epoch"), scheduler.get("frequency", 1)
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
    """Run the scheduler through, and yield the factor of the learning rates in each step or epoch."""
    fixed = [{name: group.get(name) for name in ("momentum", "betas")} for group in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing was updated before it is asked
        for at in range(steps if interval == "step" else epochs):
            if at and at % frequency == 0:
                scheduler.step()
            factors = {group["lr"] / rate for group, rate in zip(optimizer.param_groups, rates)}
            if max(factors) - min(factors) > 1e-9 * max(factors):
                raise Unfollowed(f"{type(scheduler).__name__}: groups change by different factors")
            if any(group.get(name) != of[name] for group, of in zip(optimizer.param_groups, fixed) for name in of):
                raise Unfollowed(f"{type(scheduler).__name__}: it changes momenta, too (`cycle_momentum=False`)")
            yield max(factors)


def metric_name(logged: str, part: str) -> str:
    """A logged name without the part of the data that it begins with: "val_acc", "val/acc" and "acc" are "acc"."""
    for separator in "_/":
        logged = logged.removeprefix(f"{part}{separator}")
    return logged.replace("/", "_")


@dataclass(frozen=True)
class StepObjective:
    """`training_step` while the module trains, else `validation_step`; and its own optimizer.

    The weight of a logged metric is the `batch_size` that it is logged with, as in Lightning; that of the loss is what
    torch's cross-entropy is the mean of. A step may also return a dict with "loss" and "weight".
    """

    examples: int
    epochs: int
    drop_last: bool

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        assert isinstance(model, LightningModule)
        part = "train" if model.training else "val"
        with _recorded(model, part) as metrics, LossCalls() as calls:
            returned = model.training_step(batch, 0) if model.training else model.validation_step(batch, 0)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if isinstance(loss, Tensor):
            metrics["loss"] = loss
        if isinstance(returned, Mapping) and isinstance(weight := returned.get(WEIGHT), Tensor):
            metrics[WEIGHT] = weight
        if "loss" not in metrics:
            step = "training_step" if model.training else "validation_step"
            got = f"{step}() returns {type(returned).__name__} and logs {sorted(metrics)}"
            raise ValueError(f"{got}, but must return the loss, or log it as '{part}_loss'")
        # `batch_size=` of `log` is often the number of examples: what the loss itself is the mean of comes first.
        logged = metrics.pop(LOSS_WEIGHT, None)
        calls.weigh(metrics, None, told=False)
        if logged is not None and WEIGHT not in metrics:
            metrics.setdefault(LOSS_WEIGHT, logged)
        return metrics

    def optimizer_settings(self, model: nn.Module, config: Mapping[str, Any]) -> OptimizerSettings:
        """See the function of this name."""
        assert isinstance(model, LightningModule)
        batches = self.examples / config["batch_size"]
        steps = self.epochs * (math.floor(batches) if self.drop_last else math.ceil(batches))
        return optimizer_settings(model, config, self.epochs, steps)


@contextmanager
def _recorded(model: LightningModule, part: str) -> Iterator[dict[str, Tensor]]:
    found: dict[str, Tensor] = {}

    def log(name: str, value: Any, *_: Any, reduce_fx: Any = "mean", batch_size: int | None = None, **__: Any) -> None:
        if reduce_fx not in ("mean", torch.mean):
            raise ValueError(f"self.log({name!r}, reduce_fx={reduce_fx!r}): metrics are averaged over the examples")
        own = metric_name(name, part)
        if is_weight(own):
            raise ValueError(f"self.log({name!r}): a metric cannot be called {own!r} here")
        found[own] = torch.as_tensor(value)
        if batch_size is not None:
            found[f"{WEIGHT}/{own}"] = torch.as_tensor(batch_size)

    vars(model)["log"] = log
    try:
        yield found
    finally:
        del vars(model)["log"]
