"""`tune_module()` tunes modules that Lightning's `Trainer` trains, as far as `tune` can follow their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, RandomSampler

from fusion.keys import is_read
from fusion.streams import preserved_generators
from fusion.warn import warn
from hydro_rasda.common.argument_checks import check_function, require
from hydro_rasda.common.one_line_warnings import warns_in_one_line
from hydro_rasda.integrations.lightning.objective import OF_OPTIMIZERS, StepObjective, Unfollowed, metric_name
from hydro_rasda.integrations.lightning.own_trainer import MAKES_TRAINER, MakeTrainer, by_own_trainer
from hydro_rasda.integrations.lightning.refusals import (
    PRECISIONS,
    unfollowed,
    unfollowed_by,
    unfollowed_loader,
    unfollowed_transfers,
)
from hydro_rasda.integrations.shared import (
    EvalLoader,
    LibraryResult,
    TrainLoader,
    check_options,
    check_parts,
    first_model,
    narrow_or_full,
    without_default_ema,
)
from hydro_rasda.problem.read_keys import Notes
from hydro_rasda.problem.width_argument import call_model_fn, check_width_argument, width_form
from hydro_rasda.settings.config import RaceConfig, SweepConfig
from hydro_rasda.space.branches import reachable, with_defaults
from hydro_rasda.space.space import check_space, sample
from hydro_rasda.tuner import tune


def train_loader(loader: DataLoader[Any]) -> TrainLoader:
    """Convert a DataLoader to a function of the batch size."""
    shuffled = isinstance(loader.sampler, RandomSampler)
    return TrainLoader(loader.dataset, loader.collate_fn, 1, loader.drop_last, shuffled, loader.num_workers)


def eval_loader(loader: DataLoader[Any]) -> EvalLoader:
    """Convert a DataLoader to a function that takes a batch size, but ignores it and keeps the loader's batch size."""
    assert loader.batch_size is not None
    return EvalLoader(loader.dataset, loader.collate_fn, loader.batch_size, loader.num_workers)


DECIDED = ("train_data", "val_data", "loss_fn", "objective", "metric", "max_t", "precision")


@dataclass(frozen=True, repr=False)
class LightningResult(LibraryResult):
    """The outcome of `tune_module`: a `TuneResult` for users of Lightning.

    Attributes:
        config: The part of `best_config` whose keys are in the space. `best_config` has all keys that `module_fn` got.
    """

    config: dict[str, Any]

    def module(self) -> LightningModule:
        """Return the trained module in evaluation mode, for a `Trainer` to validate or test.

        To train further, call its `train()` first, because `Trainer.fit` does not change the mode of modules.
        """
        module = self.best_model()
        assert isinstance(module, LightningModule)
        return module


@warns_in_one_line
def tune_module(
    module_fn: Callable[..., LightningModule],
    space: Mapping[str, Any],
    *,
    trainer: Trainer | MakeTrainer,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: LightningDataModule | None = None,
    monitor: str = "val_loss",
    sweep: SweepConfig = SweepConfig(),
    race: RaceConfig = RaceConfig(),
    **options: Any,
) -> LightningResult:
    """Find good hyperparameters for a `LightningModule`, and train it with them.

    The module's own `training_step`, `validation_step` and `configure_optimizers` are used. The steps run for several
    models at once (`torch.func.vmap`), so they cannot branch on a tensor's values or call `.item()`.
    Values of `self.log` are averaged over an epoch, weighted by their `batch_size`, by default the number of examples.
    The loss is weighted by the number of items that torch's cross-entropy averages, or by the "weight" that a step
    returns. Optimizers may be SGD, Adam or AdamW, with groups of different learning rates and weight decays, and a
    scheduler that is a function of the step. `batch_idx` is 0, and a step that reads `current_epoch` or `global_step`
    is refused. `trainer.max_epochs` has its usual value, and so has `trainer.estimated_stepping_batches` in
    `configure_optimizers`.

    Args:
        module_fn: `module_fn(config)`, or `module_fn(config, width_ratio)`. A module that takes no width is made
            narrower by `surrogate.shrink`. If that fails, it is swept at its full width, with a message.
        space: Domains. All keys reach `module_fn`, as do `lr`, `batch_size` and `grad_clip`, which the library adds.
            Without the key `batch_size`, the loaders keep their batch size.
        trainer: A `Trainer`, which trains nothing: only its `max_epochs`, `gradient_clip_val` and `precision` are used.
            Or a function that makes a `Trainer` from its keyword arguments, such as
            `functools.partial(Trainer, max_epochs=9)`. That `Trainer` fits the module in every heat, including manual
            optimization, hooks and callbacks. Trials are then not fused, loaders keep their batch size, and the sweep
            uses narrower modules only if `module_fn` has an argument `width_ratio`.
        train_dataloaders: A DataLoader.
        val_dataloaders: A DataLoader.
        datamodule: A data module, in place of both loaders.
        monitor: The metric by which trials are compared: a name that `validation_step` logs, or a name
            of `training_step` that begins with "train".
        sweep: As for `tune`.
        race: As for `tune`. Its `ema` is 0 by default, because `Trainer` averages no weights.
        options: Other arguments of `tune`, such as `num_samples`, `mode`, `backend` or `name`.

    Raises:
        ValueError: before any work, with a list of all that cannot be followed: callbacks, overridden hooks, manual
            optimization, optimizers, schedulers and settings of the trainer. Also as for `tune`. If `trainer` is a
            function, none of these is refused.
    """
    _check_arguments(module_fn, space, trainer, sweep, race, options)
    data = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders, "datamodule": datamodule}
    if isinstance(trainer, Trainer):
        asked = {**_followed(module_fn, space, trainer, monitor, sweep, **data), "race": without_default_ema(race)}
    else:
        asked = {"space": space, **by_own_trainer(module_fn, trainer, data, monitor, sweep, without_default_ema(race))}
    tuned, own = tune(module_fn, **asked, **options), reachable(space)
    return LightningResult(**vars(tuned), config={k: v for k, v in tuned.best_config.items() if k in own})


def _check_arguments(
    module_fn: object, space: Any, trainer: object, sweep: object, race: object, options: Mapping[str, Any]
) -> None:
    """Raise an error for arguments that are wrong by themselves, without regard to the other arguments."""
    check_options("tune_module", options)
    rule = "a function of (config) or (config, width_ratio) that makes a LightningModule"
    require(not isinstance(module_fn, LightningModule), "module_fn", type(module_fn).__name__, rule)
    check_function("module_fn", module_fn, 1, 2, rule=rule, or_class=True)
    require(isinstance(trainer, Trainer) or callable(trainer), "trainer", trainer, MAKES_TRAINER)
    check_parts(sweep, race)
    check_space(space, strategy="ddp" if isinstance(trainer, Trainer) else None)  # a trainer that is run reads no key
    given = [name for name in DECIDED if name in options]
    require(not given, given[0] if given else "", "given", "left out: trainer, module and loaders decide it")


def _followed(
    module_fn: Callable[..., LightningModule],
    space: Mapping[str, Any],
    trainer: Trainer,
    monitor: str,
    sweep: SweepConfig,
    train_dataloaders: Any,
    val_dataloaders: Any,
    datamodule: LightningDataModule | None,
) -> dict[str, Any]:
    """Convert loaders, a module's steps, and a trainer, which itself trains nothing, to arguments of `tune`.

    Raises a ValueError that lists all parts that cannot be followed.
    """
    if datamodule is not None:
        train_dataloaders, val_dataloaders = _loaders_of(datamodule, train_dataloaders, val_dataloaders)
    made = with_defaults(space, _constants(trainer, train_dataloaders))
    refused = unfollowed_loader("train_dataloaders", train_dataloaders)
    refused += unfollowed_loader("val_dataloaders", val_dataloaders) + unfollowed_transfers(datamodule)
    refused += unfollowed_by(trainer)
    config, form = sample(made, 1, 0)[0], width_form(module_fn)
    with preserved_generators():
        check_width_argument("module_fn", module_fn, sweep.surrogate)
        make = partial(call_model_fn, module_fn, form, config, 1.0)
        module = first_model("module_fn", make, config, LightningModule, "LightningModule of `lightning.pytorch`")
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
    _warn_of_replaced(module_fn, sample(made, 1, 0)[0], [*reachable(space)], objective)
    return {
        "space": made,
        "train_data": train,
        "val_data": validation,
        "objective": objective,
        "metric": monitored(monitor),
        "max_t": trainer.max_epochs or 1,
        "precision": PRECISIONS[str(trainer.precision)],
        "sweep": sweep,
    }


def monitored(monitor: str) -> str:
    """Return the run's name for a logged metric. It is one of validation unless it begins with "train_" or "train/".

    >>> monitored("val/acc"), monitored("acc"), monitored("train_loss")
    ('val_acc', 'val_acc', 'train_loss')
    """
    part = "train" if monitor.startswith(("train_", "train/")) else "val"
    return f"{part}_{metric_name(monitor, part)}"


def _loaders_of(datamodule: LightningDataModule, *loaders: Any) -> tuple[Any, Any]:
    left_out = all(loader is None for loader in loaders)
    require(left_out, "datamodule", type(datamodule).__name__, "the only data: leave the loaders out")
    datamodule.prepare_data()
    datamodule.setup("fit")
    return datamodule.train_dataloader(), datamodule.val_dataloader()


def _constants(trainer: Trainer, loader: Any) -> dict[str, Any]:
    """Return the values of trainer and loader for keys that the library reads and the space may lack.

    The value of `lr` is 1. It has no effect, because the module's optimizer replaces it.
    """
    clip = trainer.gradient_clip_val or None
    return {"lr": 1.0, "batch_size": getattr(loader, "batch_size", None) or 1, "grad_clip": clip}


def _warn_of_replaced(
    module_fn: Callable[..., LightningModule], config: dict[str, Any], own: list[str], objective: StepObjective
) -> None:
    """Warn about keys without effect: the module's optimizer replaces them, and the module does not read them."""
    notes = Notes()
    try:
        asked = [key for key in own if key in config and key in OF_OPTIMIZERS and is_read(key, config)]
        if not asked:
            return
        with preserved_generators():
            module = call_model_fn(notes.taken_by(module_fn), width_form(module_fn), config, 1.0)
            objective.optimizer_settings(module, config)
    except Exception:
        # The configuration here only resembles a dict, and some modules refuse that. If its values are wrong, `tune`
        # itself reports them.
        return
    if left := [f"`{key}`" for key in asked if key not in notes.read]:
        told = f"the module does not read {', '.join(left)}, and its configure_optimizers() says how it is trained"
        warn(f"{told}: what `space` says there changes nothing, though the best configuration will name it")


def _called_with(module: LightningModule, objective: StepObjective, batch: Any) -> Any:
    """Return the arguments, a tuple or dict, with which `validation_step` calls the module itself.

    Raises ValueError if it makes no such call.
    """
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
