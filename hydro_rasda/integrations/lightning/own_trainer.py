"""Training by Lightning's own `Trainer` in every heat: `tune_module(trainer=partial(Trainer, ...))`."""

from __future__ import annotations

import copy
import io
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, DeviceStatsMonitor, LearningRateMonitor, ModelSummary, ProgressBar
from torch import Tensor
from torch.optim import Optimizer

from hydro_rasda.common.argument_checks import require
from hydro_rasda.integrations.shared import at_full_width, check_rule, with_fresh_callbacks
from hydro_rasda.problem.width_argument import width_form
from hydro_rasda.settings.config import RaceConfig, SweepConfig
from hydro_rasda.training.worker import State, Worker

MakeTrainer = Callable[..., Trainer]
"""A function that makes a `Trainer` from its keyword arguments, such as `functools.partial(Trainer, max_epochs=9)`."""

_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
"""Arguments of each trial's trainer. They turn off its reports and files, because the run itself reports and saves.

They also turn off the check of a few validation batches before training.
"""

_LEFT_OUT = (Checkpoint, ModelSummary, ProgressBar, DeviceStatsMonitor, LearningRateMonitor)
"""Callbacks that are left out: they save, print or log, so a trainer with the arguments above refuses them."""


MAKES_TRAINER = "a Trainer of `lightning.pytorch`, or a function of its keyword arguments that makes one"
"""The rule of the argument `trainer`."""


def by_own_trainer(
    module_fn: Callable[..., LightningModule],
    trainer: MakeTrainer,
    data: Mapping[str, Any],
    monitor: str,
    sweep: SweepConfig,
    race: RaceConfig,
) -> dict[str, Any]:
    """Return arguments of `tune` with which `Trainer.fit` trains. `data` has the data arguments of `fit`."""
    with tempfile.TemporaryDirectory() as folder:
        made = _made(trainer, torch.device("cpu"), folder)
    check_rule(sweep)
    epochs, every = made.max_epochs or 0, made.check_val_every_n_epoch
    require(epochs > 0, "trainer", f"max_epochs={epochs}", "one with epochs to train")
    validated = every == 1 or not monitor.startswith("val")
    require(validated, "trainer", f"check_val_every_n_epoch={every}", f"one that logs {monitor!r} after each epoch")
    if sweep.surrogate < 1 and width_form(module_fn) is None:
        told = "give `module_fn` an argument `width_ratio`, from which it builds a narrower module"
        sweep = at_full_width(sweep, "narrower", told, what="module")
    return {
        "train": OwnTrainer(trainer, data),
        "metric": _name(monitor),
        "max_t": epochs,
        "sweep": sweep,
        # Limit the race to one process per trial: a `Trainer` starts ranks by itself, and cannot use those of a trial
        # with several workers.
        "race": replace(race, max_workers=1),
    }


@dataclass(frozen=True, eq=False)
class OwnTrainer:
    """The `train(worker)` of `tune`, in which the user's trainer fits the module from the last checkpoint on.

    A checkpoint holds the weights and, as bytes, the rest of Lightning's own checkpoint. Loops, optimizers, schedulers
    and callbacks resume from it, as they do with `ckpt_path`.
    """

    trainer: MakeTrainer
    data: Mapping[str, Any]

    def __call__(self, worker: Worker) -> None:
        module = worker.model()
        assert isinstance(module, LightningModule)
        with tempfile.TemporaryDirectory() as folder, _no_news(), _width_scaled_optimizers(worker):
            trainer = _made(self.trainer, worker.device, folder)
            trainer.callbacks.append(Reports(worker))  # type: ignore[attr-defined]
            resumed = _unpacked(worker.checkpoint, Path(folder) / "resumed.ckpt")
            trainer.fit(module, **self._own_data(), ckpt_path=resumed, weights_only=False)

    def _own_data(self) -> Mapping[str, Any]:
        """Return the data with a copy of the data module, which is one for all trials of a call in this process.

        `fit` writes to it. The user's own stays as it is, so that the same call recognizes its run.
        """
        return _OWN_DATA.setdefault(self, {**self.data, "datamodule": copy.copy(self.data["datamodule"])})


_OWN_DATA: WeakKeyDictionary[OwnTrainer, Mapping[str, Any]] = WeakKeyDictionary()


class Reports(Checkpoint):
    """A callback that reports each epoch to the run, with all values that the module logged.

    It is a `Checkpoint`, because Lightning calls such callbacks after all others, here after the user's callbacks.
    Lightning steps schedulers that follow a metric only later. So a checkpoint has the epoch's values for them.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._logged = dict[str, Tensor]()

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the epoch that the checkpoint ends with."""
        return self._logged

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the values of the epoch that the checkpoint ends with."""
        self._logged = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After a pause, step schedulers that follow a metric, because Lightning has not done so for the last epoch."""
        for config in trainer.lr_scheduler_configs if pl_module.automatic_optimization else ():
            due = config.interval == "epoch" and trainer.current_epoch % config.frequency == 0
            if config.reduce_on_plateau and due and config.monitor in self._logged:
                pl_module.lr_scheduler_step(config.scheduler, self._logged[config.monitor])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the epoch to the run. If this pauses or stops the trial, the call does not return to the trainer."""
        self._logged = dict(trainer.callback_metrics)
        logged = {_name(name): float(value) for name, value in self._logged.items()}
        self._worker.report(logged, lambda: _packed(trainer, pl_module), final=trainer.fit_loop.done)


def _made(make: MakeTrainer, device: torch.device, folder: str) -> Trainer:
    where = {"accelerator": "cpu", "devices": 1}
    if device.type == "cuda":
        where = {"accelerator": "gpu", "devices": [device.index or 0]}
    try:
        trainer = with_fresh_callbacks(make, _LEFT_OUT)(**where, **_QUIET, default_root_dir=folder)
    except Exception as error:
        raise ValueError(
            f"`trainer` is {MAKES_TRAINER}, but the call fails: {type(error).__name__}: {error}"
        ) from error
    require(isinstance(trainer, Trainer), "trainer", type(trainer).__name__, MAKES_TRAINER)
    return trainer


def _name(logged: str) -> str:
    return logged.replace("/", "_")


@contextmanager
def _no_news() -> Iterator[None]:
    """Within the context, silence Lightning's messages on devices and checkpoints, which would come at each resume."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


@contextmanager
def _width_scaled_optimizers(worker: Worker) -> Iterator[None]:
    """Within the context, scale the learning rates of each new optimizer to the module's width.

    This happens when the optimizer is made, before schedulers read these rates.
    """
    made = Optimizer.__init__

    def scaled(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        made(self, worker.param_groups(params, type(self), **defaults), defaults)

    Optimizer.__init__ = scaled  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = made  # type: ignore[method-assign]


def _packed(trainer: Trainer, module: LightningModule) -> State:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    del checkpoint["state_dict"]
    written = io.BytesIO()
    torch.save(checkpoint, written)
    return {
        "model": module.state_dict(),
        "lightning": torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8),
    }


def _unpacked(state: State | None, path: Path) -> Path | None:
    """Write a checkpoint for Lightning to read, and return its path; None if there is no checkpoint."""
    if state is None:
        return None
    content: Tensor = state["lightning"]
    checkpoint = torch.load(io.BytesIO(content.cpu().numpy().tobytes()), map_location="cpu", weights_only=False)
    torch.save({**checkpoint, "state_dict": state["model"]}, path)
    return path
