"""`tune_module()`: training by Lightning's `Trainer`, tuned, as far as `tune` can follow its parts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fusion.streams import preserved_generators
from hydro_rasda.branches_and_variants import reachable, with_defaults
from hydro_rasda.checks import check_is, require
from hydro_rasda.config import Precision, RaceConfig, SweepConfig
from hydro_rasda.integrations.lightning.objective import StepObjective, Unfollowed, metric_name
from hydro_rasda.integrations.shared import (
    EvalLoader,
    LibraryResult,
    TrainLoader,
    check_parts,
    narrow_or_full,
    unaveraged,
)
from hydro_rasda.renames import refuse_renamed
from hydro_rasda.secret_masking import shown
from hydro_rasda.space import check_space, sample
from hydro_rasda.surrogate_models import WidthForm, call_model_fn, check_width_argument, width_form
from hydro_rasda.tuner import tune

HOOKS = (
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_validation_start", "on_validation_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
    *("configure_callbacks", "configure_model", "configure_sharded_model", "on_save_checkpoint", "on_load_checkpoint"),
    *("prepare_data", "setup"),
)
"""Methods of a module that would have to run for one model, in the course of one training."""

HARMLESS = (ModelCheckpoint, ModelSummary, ProgressBar)
"""Callbacks that print and save: the run does that by itself."""

PRECISIONS: dict[str, Precision] = {"32-true": "fp32", "32": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}

_SETTINGS: dict[str, Any] = {
    "max_steps": -1,
    "min_epochs": (None, 0, 1),
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "overfit_batches": (0, 0.0),
    "fast_dev_run": False,
    "accumulate_grad_batches": 1,
    "reload_dataloaders_every_n_epochs": 0,
}


def unfollowed(module: LightningModule) -> list[str]:
    """List in words the parts of a module that cannot be followed."""
    name = type(module).__name__
    told = [f"{name}.{hook}(): it is overridden" for hook in HOOKS if is_overridden(hook, module)]
    if not module.automatic_optimization:
        told.append(f"{name}: its optimization is manual (`automatic_optimization=False`)")
    needed = ("training_step", "validation_step", "configure_optimizers")
    told += [f"{name}.{method}(): it is missing" for method in needed if not is_overridden(method, module)]
    return told + [f"{name}.{path}: a metric of torchmetrics, which keeps a state" for path in _stateful(module)]


def unfollowed_by(trainer: Any) -> list[str]:
    """List in words the settings of a trainer that cannot be followed."""
    told = []
    for name, expected in _SETTINGS.items():
        value = getattr(trainer, name, None)
        if value != expected and not (isinstance(expected, tuple) and value in expected):
            why = ": use the key `accumulate` of the space" if name == "accumulate_grad_batches" else ""
            told.append(f"Trainer({name}={value!r}){why}")
    if trainer.gradient_clip_val is not None and str(trainer.gradient_clip_algorithm or "norm") != "norm":
        told.append("Trainer(gradient_clip_algorithm='value'): norms are clipped")
    if trainer.max_epochs is None or trainer.max_epochs < 1:
        told.append(f"Trainer(max_epochs={trainer.max_epochs!r}): a number of epochs >= 1")
    if str(trainer.precision) not in PRECISIONS:
        told.append(f"Trainer(precision={trainer.precision!r}): one of {', '.join(PRECISIONS)}")
    return told + [f"{type(own).__name__}: a callback" for own in trainer.callbacks if not isinstance(own, HARMLESS)]


def _stateful(module: nn.Module) -> Iterable[str]:
    if importlib.util.find_spec("torchmetrics") is None:
        return []
    from torchmetrics import Metric

    return [path for path, child in module.named_modules() if isinstance(child, Metric)]


def unfollowed_loader(name: str, loader: Any) -> list[str]:
    """Why a loader cannot be made again for other batch sizes, in words."""
    if not isinstance(loader, DataLoader):
        return [f"{name}: a {type(loader).__name__}, but must be one DataLoader"]
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        return [f"{name}: its data set has no length"]
    if loader.batch_size is None or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return [f"{name}: it has a sampler of its own, which other batch sizes would need, too"]
    return []


def train_loader(loader: DataLoader[Any]) -> TrainLoader:
    """The same loader, as a function of the batch size."""
    shuffled = isinstance(loader.sampler, RandomSampler)
    return TrainLoader(loader.dataset, loader.collate_fn, 1, loader.drop_last, shuffled, loader.num_workers)


def eval_loader(loader: DataLoader[Any]) -> EvalLoader:
    """The same loader, whatever batch size it is asked for."""
    assert loader.batch_size is not None
    return EvalLoader(loader.dataset, loader.collate_fn, loader.batch_size, loader.num_workers)


DECIDED = ("train_data", "val_data", "loss_fn", "objective", "metric", "max_t", "precision")


@dataclass(frozen=True, repr=False)
class LightningResult(LibraryResult):
    """The outcome of `tune_module`: a `TuneResult`, with what Lightning needs besides.

    Attributes:
        config: Of `best_config`, which is all that `module_fn` was given, the keys of the space.
    """

    config: dict[str, Any]

    def module(self) -> LightningModule:
        """The trained module, in evaluation mode, for a `Trainer` to validate, test or train on."""
        module = self.best_model()
        assert isinstance(module, LightningModule)
        return module


def tune_module(
    module_fn: Callable[..., LightningModule],
    space: Mapping[str, Any],
    *,
    trainer: Trainer,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: LightningDataModule | None = None,
    monitor: str = "val_loss",
    sweep: SweepConfig = SweepConfig(),
    race: RaceConfig = RaceConfig(),
    **options: Any,
) -> LightningResult:
    """Find good hyperparameters for a `LightningModule`, and train it with them.

    `training_step`, `validation_step` and `configure_optimizers` are the module's own. A batch goes through them as it
    is, with several models at once (`torch.func.vmap`), so no step can branch on a tensor's values or call `.item()`.
    Values of `self.log` are averaged over an epoch by their `batch_size`, by default the number of examples. The loss
    counts by the items that torch's cross-entropy averages, or by the "weight" that a step returns. Optimizers may be
    SGD, Adam or AdamW, with groups of different learning rates and weight decays, and a scheduler that is a function of
    the step. `batch_idx` is 0, and so are `current_epoch` and `global_step`; in `configure_optimizers`,
    `trainer.estimated_stepping_batches` and `trainer.max_epochs` are what they are for `Trainer`.

    Args:
        module_fn: `module_fn(config)`, or `module_fn(config, width_ratio)`. A module that takes no width is made
            narrower by `surrogate.shrink`. If that fails, it is swept at its full width, with a message.
        space: Domains; all reach `module_fn`. `batch_size` is the loaders', which keep theirs without it.
        trainer: Its `max_epochs`, `gradient_clip_val` and `precision` hold; it trains nothing.
        train_dataloaders: A DataLoader.
        val_dataloaders: Likewise.
        datamodule: In place of both.
        monitor: The metric by which trials are compared: a name that `validation_step` logs.
        sweep: As for `tune`.
        race: As for `tune`; its `ema` is 0 by default, as `Trainer` averages no weights.
        options: Other arguments of `tune`, such as `num_samples`, `mode`, `backend` or `name`.

    Raises:
        ValueError: before any work, for what cannot be followed, all of it listed: callbacks, hooks that are
            overridden, manual optimization, optimizers, schedulers and settings of the trainer; and as `tune`.
    """
    refuse_renamed("tune_module", options)
    check_is("trainer", trainer, Trainer)
    check_parts(sweep, race)
    check_space(space)
    given = [name for name in DECIDED if name in options]
    require(not given, given[0] if given else "", "given", "left out: trainer, module and loaders decide it")
    if datamodule is not None:
        train_dataloaders, val_dataloaders = _loaders_of(datamodule, train_dataloaders, val_dataloaders)
    made = with_defaults(space, _constants(trainer, train_dataloaders))
    asked = _asked(module_fn, made, trainer, train_dataloaders, val_dataloaders, sweep)
    tuned = tune(
        module_fn, made, metric=f"val_{metric_name(monitor, 'val')}", race=unaveraged(race), **asked, **options
    )
    own = reachable(space)
    return LightningResult(**vars(tuned), config={k: v for k, v in tuned.best_config.items() if k in own})


def _asked(
    module_fn: Callable[..., LightningModule],
    space: Mapping[str, Any],
    trainer: Trainer,
    train_dataloaders: Any,
    val_dataloaders: Any,
    sweep: SweepConfig,
) -> dict[str, Any]:
    """Turn a trainer, loaders and a module's steps into arguments of `tune`; ValueError for what cannot be followed."""
    refused = [*unfollowed_loader("train_dataloaders", train_dataloaders)]
    refused += unfollowed_loader("val_dataloaders", val_dataloaders)
    refused += unfollowed_by(trainer)
    with preserved_generators():
        config = sample(space, 1, 0)[0]
        form = width_form(module_fn)
        check_width_argument("module_fn", module_fn, sweep.surrogate)
        module = _first(module_fn, form, config)
        refused += unfollowed(module)
        if not refused:
            train, validation = train_loader(train_dataloaders), eval_loader(val_dataloaders)
            objective = StepObjective(len(train.dataset), trainer.max_epochs or 1, train.drop_last)
            try:
                objective.optimizer_settings(module, config)
            except Unfollowed as error:
                refused.append(f"{type(module).__name__}.configure_optimizers(): {error}")
        if refused:
            raise ValueError("tune_module() cannot follow:\n- " + "\n- ".join(refused))
        if form is None:
            batch = next(iter(validation(1)))
            sweep = narrow_or_full(sweep, module, lambda: _called_with(module, objective, batch))
    told = {"max_t": trainer.max_epochs or 1, "precision": PRECISIONS[str(trainer.precision)], "sweep": sweep}
    return {"train_data": train, "val_data": validation, "objective": objective, **told}


def _loaders_of(datamodule: LightningDataModule, *loaders: Any) -> tuple[Any, Any]:
    left_out = all(loader is None for loader in loaders)
    require(left_out, "datamodule", type(datamodule).__name__, "the only data: leave the loaders out")
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule.train_dataloader(), datamodule.val_dataloader()


def _constants(trainer: Trainer, loader: Any) -> dict[str, Any]:
    """Keys that the library reads, where the space has none of them; the module's own optimizer replaces the rate."""
    clip = trainer.gradient_clip_val or None
    return {"lr": 1.0, "batch_size": getattr(loader, "batch_size", None) or 1, "grad_clip": clip}


def _first(
    module_fn: Callable[..., LightningModule], form: WidthForm | None, config: dict[str, Any]
) -> LightningModule:
    try:
        module = call_model_fn(module_fn, form, config, 1.0)
    except Exception as error:
        raise ValueError(f"`module_fn` fails for {shown(config)!r} with {type(error).__name__}: {error}") from error
    require(isinstance(module, LightningModule), "module_fn", type(module).__name__, "one that makes a LightningModule")
    assert isinstance(module, LightningModule)
    return module


def _called_with(module: LightningModule, objective: StepObjective, batch: Any) -> Any:
    """Return the arguments with which a step calls the module, positional or a dict; ValueError without a call."""
    calls: list[Any] = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs or args), with_kwargs=True)
    with handle, torch.no_grad():
        objective(module.eval(), batch)
    if not calls:
        raise ValueError(
            "its steps call parts of it, such as `self.net(x)`, and not the module itself. Have them call `self(x)`, "
            "with a `forward` that calls the parts; or give `module_fn` an argument `width_ratio`"
        )
    return calls[0]
