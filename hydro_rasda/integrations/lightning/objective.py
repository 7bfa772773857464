"""The steps of a module as an objective of `tune`; logged values are its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from fusion.evaluate.microbatch import WEIGHT, is_weight
from hydro_rasda.data import Batch
from hydro_rasda.integrations.lightning.configure_optimizers import attached, optimizer_settings
from hydro_rasda.problem.loss_weight import LOSS_WEIGHT, LossCalls
from hydro_rasda.problem.objective import OptimizerSettings


def metric_name(logged: str, part: str) -> str:
    """Return a logged name without its prefix for the part of the data: "val_acc", "val/acc" and "acc" become "acc"."""
    for separator in "_/":
        logged = logged.removeprefix(f"{part}{separator}")
    return logged.replace("/", "_")


@dataclass(frozen=True)
class StepObjective:
    """An objective that calls `training_step` or `validation_step`, and takes the module's own optimizer.

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
        # As Lightning does, pass no index to a step without an argument for it.
        index = (0,) if is_param_in_hook_signature(run, "batch_idx", min_args=2) else ()
        known = {"max_epochs": self.epochs, "training": model.training, "sanity_checking": False}
        with attached(model, run.__name__, **known), _recorded(model, part) as metrics, LossCalls() as calls:
            returned = run(batch, *index)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        # In validation, a logged "loss" takes precedence, because Lightning monitors it.
        if isinstance(loss, Tensor) and (model.training or "loss" not in metrics):
            metrics["loss"] = loss
        if isinstance(returned, Mapping) and isinstance(weight := returned.get(WEIGHT), Tensor):
            metrics[WEIGHT] = weight
        if "loss" not in metrics:
            got = f"{run.__name__}() returns {type(returned).__name__} and logs {sorted(metrics)}"
            raise ValueError(f"{got}, but must return the loss, or log it as '{part}_loss'")
        # The items that the loss averages take precedence over `batch_size=` of `log`, often the number of examples.
        logged = metrics.pop(LOSS_WEIGHT, None)
        calls.weigh(metrics, None, told=False)
        if logged is not None and WEIGHT not in metrics:
            metrics.setdefault(LOSS_WEIGHT, logged)
        return metrics

    def optimizer_settings(self, model: nn.Module, config: Mapping[str, Any]) -> OptimizerSettings:
        """Return the settings of the module's own optimizer: see the function of the same name."""
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
