"""Training by the user's own subclass of `Trainer` in every heat: `tune_trainer(trainer_class=...)`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from hydro_rasda.common.argument_checks import require
from hydro_rasda.integrations.shared import at_full_width, check_rule, with_fresh_callbacks
from hydro_rasda.integrations.transformers.arguments import arguments_with, epochs_of, made_with
from hydro_rasda.integrations.transformers.data import model_function
from hydro_rasda.settings.config import SweepConfig
from hydro_rasda.space.branches import reachable
from hydro_rasda.space.space import check_space, sample
from hydro_rasda.training.worker import State, Worker
from surrogate.transformers_config import narrow_by_config

TrainerClass = Callable[..., Trainer]
"""A subclass of `Trainer`, or a function that makes a `Trainer` from its keyword arguments."""

_EACH_EPOCH: dict[str, Any] = {
    "eval_strategy": "epoch",
    "eval_delay": 0,
    "eval_on_start": False,
    "save_strategy": "no",
    "save_only_model": False,
    "restore_callback_states_from_checkpoint": True,
    "disable_tqdm": True,
    "report_to": [],
    "push_to_hub": False,
}
"""Training arguments of each trial. Its trainer evaluates after each epoch. It reports and saves nothing, because the
run itself does. `load_best_model_at_end` has no effect on a trainer that saves nothing. It stays as it is, because
`EarlyStoppingCallback` would otherwise warn that the best model will not be loaded."""

_WEIGHTS = (".safetensors", ".bin")


def by_own_trainer(
    trainer_class: TrainerClass,
    model: Any,
    model_class: Any,
    args: TrainingArguments,
    space: Mapping[str, Any],
    given: Mapping[str, Any],
    sweep: SweepConfig,
) -> dict[str, Any]:
    """Return arguments of `tune` with which `trainer_class` trains. `given` are arguments of `Trainer`."""
    rule = "a subclass of Trainer, or a function of its keyword arguments"
    require(callable(trainer_class), "trainer_class", trainer_class, rule)
    check_space(space, strategy=None)
    check_rule(sweep)
    data = ("train_dataset", "eval_dataset")
    for name in data:
        empty = isinstance(given[name], Sized) and not len(given[name])
        require(not empty, name, given[name], "a data set of one example or more")
    epochs = epochs_of(args, space)
    made_with(args, sample(space, 1, args.seed)[0])  # raises for values that are wrong
    own = tuple(name for name in reachable(space) if not hasattr(args, name))
    build = model_function(model, model_class, own, args.use_cache)
    if sweep.surrogate < 1 and not _narrows(model, build, sample(space, 1, args.seed)[0], sweep.surrogate):
        told = "it is no PretrainedConfig that has a narrower form"
        sweep = at_full_width(sweep, "narrower", told)
    return {
        "model_fn": NarrowByConfig(build),
        "space": space,
        "train": OwnTrainer(trainer_class, args, {name: of for name, of in given.items() if name not in data}),
        "train_data": given["train_dataset"],
        "val_data": given["eval_dataset"],
        "max_t": epochs,
        "sweep": sweep,
    }


def _narrows(model: Any, build: Callable[..., nn.Module], config: Mapping[str, Any], width_ratio: float) -> bool:
    return isinstance(model, PretrainedConfig) and narrow_by_config(build(config), width_ratio) is not None


@dataclass(frozen=True)
class NarrowByConfig:
    """A `model_fn(config, width_ratio)` that builds a narrower model from a narrower `PretrainedConfig`."""

    build: Callable[[Mapping[str, Any]], nn.Module]

    def __call__(self, config: Mapping[str, Any], width_ratio: float = 1.0) -> nn.Module:
        model = self.build(config)
        narrow = model if width_ratio == 1 else narrow_by_config(model, width_ratio)
        if narrow is None:
            raise ValueError(f"{type(model).__name__} has no narrower form: set `sweep=SweepConfig(surrogate=1)`")
        return narrow


@dataclass(frozen=True)
class OwnTrainer:
    """The `train(worker)` of `tune`, in which the user's `Trainer` trains, and evaluates after each epoch.

    A checkpoint holds the weights and, as bytes, the other files of `Trainer`'s own checkpoint. Random numbers,
    schedule and callbacks resume from it, as they do with `resume_from_checkpoint`.
    """

    trainer_class: TrainerClass
    args: TrainingArguments
    inputs: Mapping[str, Any]

    def __call__(self, worker: Worker) -> None:
        train_dataset, eval_dataset = worker.data
        with tempfile.TemporaryDirectory() as folder, _on(worker.device):
            trainer = with_fresh_callbacks(self.trainer_class)(
                model=worker.model(),
                args=_arguments(self.args, worker, folder),
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                **self.inputs,
            )
            optimizer = trainer.create_optimizer()
            optimizer.param_groups = worker.param_groups(optimizer.param_groups, type(optimizer), **optimizer.defaults)
            trainer.remove_callback(PrinterCallback)
            trainer.callback_handler.callbacks.insert(0, Reports(worker, trainer))
            trainer.train(resume_from_checkpoint=_unpacked(trainer, worker.checkpoint, Path(folder) / "resumed"))


def _arguments(args: TrainingArguments, worker: Worker, folder: str) -> TrainingArguments:
    """Return the training arguments of a trial: those that the user would make with the values of its configuration."""
    own = made_with(args, worker.config)
    # `Trainer` would take the first GPU of the machine, and split batches among all GPUs by `DataParallel`.
    own._n_gpu = min(own.n_gpu, 1)
    if worker.device.type == "cuda":
        vars(own)["_setup_devices"] = worker.device
    return arguments_with(own, {**_EACH_EPOCH, "output_dir": folder})


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `device`, if it is a GPU, is the one that torch and accelerate take by default."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Reports(TrainerCallback):  # type: ignore[misc]
    """A callback that reports each epoch and its evaluation to the run when the next epoch begins or training ends."""

    def __init__(self, worker: Worker, trainer: Trainer) -> None:
        self._worker, self._trainer = worker, trainer
        self._metrics: dict[str, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Keep the last logged training loss for the report of the epoch."""
        if logs is not None and "loss" in logs:
            self._metrics["train_loss"] = logs["loss"]

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep the metrics of an evaluation for the report of the epoch. Each validation set has its own evaluation."""
        found = {f"val_{name.removeprefix('eval_')}": value for name, value in (metrics or {}).items()}
        self._metrics.update(found)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Report the previous epoch to the run, if it was trained since this training began or resumed."""
        self._report()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Report the last epoch to the run."""
        self._report(final=True)

    def _report(self, final: bool = False) -> None:
        if any(name.startswith("val_") for name in self._metrics):
            metrics, self._metrics = self._metrics, {}
            self._worker.report(metrics, self._state, final=final)

    def _state(self) -> State:
        trainer = self._trainer
        # The run may ask for the state after training has returned and removed its folder, so save to a new one.
        with tempfile.TemporaryDirectory() as folder:
            trainer.args.output_dir = folder
            with _no_bars():
                trainer._save_checkpoint(trainer.model, trial=None)
            saved = Path(folder) / f"checkpoint-{trainer.state.global_step}"
            files = {path.name: _as_tensor(path) for path in saved.iterdir() if path.suffix not in _WEIGHTS}
        return {"model": trainer.model.state_dict(), "files": files}


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers within the context."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _as_tensor(path: Path) -> Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))


def _unpacked(trainer: Trainer, checkpoint: State | None, folder: Path) -> str | None:
    """Write a checkpoint to a folder from which `Trainer` resumes, and return the folder; None without a checkpoint."""
    if checkpoint is None:
        return None
    trainer.model.load_state_dict(checkpoint["model"])
    with _no_bars():
        trainer.save_model(str(folder))
    for name, content in checkpoint["files"].items():
        (folder / name).write_bytes(content.cpu().numpy().tobytes())
    return str(folder)
