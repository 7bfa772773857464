"""Find the hooks, callbacks, settings and loaders that `tune_module` refuses, because it cannot follow them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sized
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hydro_rasda.settings.config import Precision

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

HOOKS = (
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_validation_start", "on_validation_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *_TRANSFERS,
    *("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
    *("configure_callbacks", "configure_model", "configure_sharded_model", "on_save_checkpoint", "on_load_checkpoint"),
    *("prepare_data", "setup"),
)
"""Hooks of a module that expect one model with a training of its own, so they cannot run for fused models."""

HARMLESS = (ModelCheckpoint, ModelSummary, ProgressBar)
"""Callbacks that only print or save. They are accepted and ignored, because the run itself prints and saves."""

PRECISIONS: dict[str, Precision] = {"32-true": "fp32", "32": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}

_SETTINGS: dict[str, Any] = {
    "max_steps": -1,
    "min_epochs": (None, 0, 1),
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "overfit_batches": 0,
    "fast_dev_run": False,
    "accumulate_grad_batches": 1,
    "reload_dataloaders_every_n_epochs": 0,
}


def unfollowed(module: LightningModule) -> list[str]:
    """List the parts of a module that this integration cannot train as Lightning would, in words for a message."""
    name = type(module).__name__
    told = [f"{name}.{hook}(): it is overridden" for hook in HOOKS if is_overridden(hook, module)]
    if not module.automatic_optimization:
        told.append(f"{name}: its optimization is manual (`automatic_optimization=False`)")
    needed = ("training_step", "validation_step", "configure_optimizers")
    told += [f"{name}.{method}(): it is missing" for method in needed if not is_overridden(method, module)]
    return told + [f"{name}.{path}: a metric of torchmetrics, which keeps a state" for path in _stateful(module)]


def unfollowed_by(trainer: Any) -> list[str]:
    """List the settings of a trainer that this integration cannot follow, in words for a message."""
    told = []
    for name, expected in _SETTINGS.items():
        value = getattr(trainer, name, None)
        # A limit of 1 means one batch, and 1.0 means all batches. Refuse the int, although it equals the float.
        a_number = isinstance(expected, float) and isinstance(value, int)
        if a_number or (value != expected and not (isinstance(expected, tuple) and value in expected)):
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


def unfollowed_transfers(datamodule: LightningDataModule | None) -> list[str]:
    """List the hooks of a data module that change batches after its loaders have made them, in words for a message."""
    if datamodule is None:
        return []
    name = type(datamodule).__name__
    return [f"{name}.{hook}(): it is overridden" for hook in _TRANSFERS if is_overridden(hook, datamodule)]


def unfollowed_loader(name: str, loader: Any) -> list[str]:
    """Say why a loader cannot be made again for other batch sizes; an empty list if it can."""
    if not isinstance(loader, DataLoader):
        return [f"{name}: a {type(loader).__name__}, but must be one DataLoader"]
    if isinstance(loader.dataset, IterableDataset) or not isinstance(loader.dataset, Sized):
        return [f"{name}: its data set has no length"]
    sampler: Any = loader.sampler
    if loader.batch_size is None or type(sampler) not in (RandomSampler, SequentialSampler):
        return [f"{name}: it has a sampler of its own, which other batch sizes would need, too"]
    if len(loader.dataset) == 0:
        return [f"{name}: its data set is empty"]
    if len(sampler) != len(loader.dataset) or getattr(sampler, "replacement", False):
        return [f"{name}: its sampler draws {len(sampler)} examples, but must take each of the data set once"]
    return []
