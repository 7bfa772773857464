"""The steps of a module as an objective of `tune`, with its own optimizer and schedule. Logged values are metrics."""

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
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fusion.evaluate.microbatch import WEIGHT, is_weight
from fusion.keys import KEYS
from hydro_rasda.data import Batch
from hydro_rasda.problem.loss_weight import LOSS_WEIGHT, LossCalls
from hydro_rasda.problem.objective import OptimizerSettings


def metric_name(logged: str, part: str) -> str:
    """Return a logged name without its prefix for the part of the data: "val_acc", "val/acc" and "acc" become "acc"."""
    for separator in "_/":
        logged = logged.removeprefix(f"{part}{separator}")
    return logged.replace("/", "_")


@dataclass(frozen=True)
class StepObjective:
    """An objective that calls `training_step` or `validation_step`, and uses the module's own optimizer.

    A logged metric is weighted by its `batch_size`, as in Lightning. The loss is weighted by the number of items that
    torch's cross-entropy averages. A step may also return a dict with "loss" and "weight".
    """

    examples: int
    epochs: int
    drop_last: bool

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        assert isinstance(model, LightningModule)
        part = "train" if model.training else "val"
        run: Any = model.training_step if model.training else model.validation_step
        # Like Lightning, pass the batch's index only to a step that has a second argument for it.
        index = (0,) if is_param_in_hook_signature(run, "batch_idx", min_args=2) else ()
        known = {"max_epochs": self.epochs, "training": model.training, "sanity_checking": False}
        with attached(model, run.__name__, **known), _recorded(model, part) as metrics, LossCalls() as calls:
            returned = run(batch, *index)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        # In validation, a logged "loss" replaces the returned loss, because Lightning monitors the logged value.
        if isinstance(loss, Tensor) and (model.training or "loss" not in metrics):
            metrics["loss"] = loss
        if isinstance(returned, Mapping) and isinstance(weight := returned.get(WEIGHT), Tensor):
            metrics[WEIGHT] = weight
        if "loss" not in metrics:
            got = f"{run.__name__}() returns {type(returned).__name__} and logs {sorted(metrics)}"
            raise ValueError(f"{got}, but must return the loss, or log it as '{part}_loss'")
        # The loss is weighted by the "weight" that the step returns, or else by the number of items that it averages.
        # If neither is known, use `batch_size=` of `log`, which often counts examples instead.
        logged = metrics.pop(LOSS_WEIGHT, None)
        calls.weigh(metrics, None, told=False)
        if logged is not None and WEIGHT not in metrics:
            metrics.setdefault(LOSS_WEIGHT, logged)
        return metrics

    def optimizer_settings(self, model: nn.Module, config: Mapping[str, Any]) -> OptimizerSettings:
        """Return the settings of the module's own optimizer; see the function `optimizer_settings`."""
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
        found[own] = torch.as_tensor(value).squeeze()
        if batch_size is not None:
            found[f"{WEIGHT}/{own}"] = torch.as_tensor(batch_size)

    vars(model)["log"] = log
    try:
        yield found
    finally:
        del vars(model)["log"]


_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
}
_SAME = ("momentum", "dampening", "nesterov", "betas", "eps")
_OFF = ("amsgrad", "maximize", "decoupled_weight_decay")


class Unfollowed(ValueError):
    """Raised for a part of a module that `tune` cannot follow, that is, train as Lightning would."""


@dataclass(frozen=True)
class Recorded:
    """A `schedule(step, steps)` made from recorded factors of a scheduler, one factor for each step or epoch."""

    factors: tuple[float, ...]

    def __call__(self, step: int, steps: int) -> float:
        return self.factors[min(step * len(self.factors) // steps, len(self.factors) - 1)]


def optimizer_settings(
    module: LightningModule, config: Mapping[str, Any], epochs: int, steps: int
) -> OptimizerSettings:
    """Return the settings by which a module's own optimizer updates its parameters.

    Args:
        config: The trial's configuration. The result has its keys, except that the module's own optimizer and schedule
            replace the keys of `OF_OPTIMIZERS`.

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
    """A stand-in for the trainer, with only the few attributes that a certain method of a module may read."""

    global_rank = local_rank = 0
    logger, loggers = None, ()

    def __init__(self, method: str, **known: Any) -> None:
        super().__init__(**known)
        self._method = method

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(name for name in vars(self) if not name.startswith("_"))
        told = f"{self._method}() asks for `trainer.{name}`, but here it can only ask for {known}"
        # `LightningModule` reads these two names in properties. An AttributeError in a property would lose its text,
        # because Python then calls the module's `__getattr__`.
        raise Unfollowed(told) if name in ("current_epoch", "global_step") else AttributeError(told)


@contextmanager
def attached(module: LightningModule, method: str, **known: Any) -> Iterator[None]:
    """Within the context, give a module a stand-in trainer with the attributes `known`.

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
    """Run the scheduler over the whole training, and yield the factor of the learning rates in each step or epoch.

    If there is a `frequency`, Lightning counts the steps of each epoch from 0, and so does this function.
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
