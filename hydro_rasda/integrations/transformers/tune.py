"""`tune_trainer()`: tunes what `transformers.Trainer` trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset
from transformers import EvalPrediction, PretrainedConfig, Trainer, TrainingArguments

from fusion.streams import preserved_generators
from fusion.warn import warn
from hydro_rasda.backends.local import LocalBackend
from hydro_rasda.common.argument_checks import check_is
from hydro_rasda.common.one_line_warnings import warns_in_one_line
from hydro_rasda.integrations.shared import (
    Collator,
    LibraryResult,
    check_options,
    check_parts,
    first_model,
    narrow_or_full,
    without_default_ema,
)
from hydro_rasda.integrations.transformers.arguments import (
    PRECISIONS,
    arguments_with,
    made_with,
    metric_of,
    metrics_refused,
    own_names,
    to_known,
    to_space,
    unfollowed,
    warmup_of,
    with_values,
)
from hydro_rasda.integrations.transformers.data import collator, loaders, model_function
from hydro_rasda.integrations.transformers.objective import (
    TrainerMetrics,
    predictions_of,
    schedules_refused,
    trainer_objective,
)
from hydro_rasda.integrations.transformers.own_trainer import TrainerClass, by_own_trainer
from hydro_rasda.settings.config import RaceConfig, SweepConfig
from hydro_rasda.space.branches import reachable
from hydro_rasda.space.space import check_space, reached, sample
from hydro_rasda.tuner import tune

DECIDED = (
    *("train_data", "val_data", "loss_fn", "objective", "metrics", "metric", "mode", "max_t"),
    *("precision", "seed"),
)
"""Arguments of `tune` that users cannot give, because they follow from the training arguments and data sets."""


@warns_in_one_line
def tune_trainer(
    model: Callable[..., nn.Module] | PretrainedConfig,
    args: TrainingArguments,
    space: Mapping[str, Any],
    *,
    train_dataset: Any,
    eval_dataset: Any,
    data_collator: Collator | None = None,
    processing_class: Any = None,
    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
    preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    model_class: Any = None,
    trainer_class: TrainerClass | None = None,
    sweep: SweepConfig = SweepConfig(),
    race: RaceConfig = RaceConfig(),
    **options: Any,
) -> TrainerResult:
    """Find good training arguments for a model of `transformers`, and train it with them.

    `TrainingArguments` mean the same as for `Trainer`. This covers the learning rate, `lr_scheduler_type` with its
    warm-up (step by step), weight decay (biases and norms are spared), gradient accumulation and clipping. It also
    covers fp16, bf16, label smoothing, batch sizes, epochs and seed. With
    `load_best_model_at_end`, the weights of the best epoch are kept; otherwise, those of the last epoch.
    Random numbers are the library's own: each trial has its own initial weights, shuffles and dropout.

    A batch has `per_device_train_batch_size * gradient_accumulation_steps` examples, which go through the model
    together. The gradient is the one that `Trainer` accumulates over several steps.

    Surrogates are built from a narrower configuration (see `surrogate.shrink`). If the model cannot be made
    narrower, or its weights are pretrained, it is swept at full width, with a message.

    Args:
        model: `Trainer`'s `model_init`, or a `PretrainedConfig`, some of whose attributes may be in `space`. A
            `model_init` takes nothing, or a dict of the trial's hyperparameters. The dict has the keys of `space` that
            are no training arguments. `hydro_rasda.integrations.peft.adapters` makes a `model_init`.
        args: The training arguments of all trials. Values from `space` replace some of them.
        space: Domains by the name of a training argument: `learning_rate`, `per_device_train_batch_size`,
            `weight_decay`, `adam_beta1`, `adam_beta2`, `adam_epsilon`, `max_grad_norm`, `optim`, `lr_scheduler_type`,
            `warmup_steps`. Other names are hyperparameters of the model.
        train_dataset: A data set with a length.
        eval_dataset: A data set with a length, on which trials are compared.
        data_collator: As for `Trainer`.
        processing_class: As for `Trainer`: a tokenizer or a feature extractor pads batches if there is no collator.
        compute_metrics: As for `Trainer`. It is called after each epoch of each trial, on the whole validation set.
            If it is given, trials are compared by `args.metric_for_best_model`, in the direction of
            `args.greater_is_better`. If it is None, they are compared by the loss.
        preprocess_logits_for_metrics: As for `Trainer`. It reduces the logits of each batch before they are kept for
            `compute_metrics`.
        model_class: Class of the model of a `PretrainedConfig`; None for the class that its `architectures` name.
        trainer_class: A subclass of `Trainer` that trains in every heat, with its own `compute_loss`, callbacks,
            optimizers and samplers. Or a function that makes one from `Trainer`'s keyword arguments, such as
            `functools.partial(MyTrainer, callbacks=[...])`. Each trial gets copies of these callbacks. Trials are then
            not fused, and each trains in one process. Any training argument but `max_steps` may be in `space`; `max_t`
            is then the largest `num_train_epochs`. `best_config` has the names of training arguments. Only a
            `PretrainedConfig` has surrogates. Each epoch is evaluated; `Trainer`'s metric "eval_f1" is reported as
            "val_f1". The run itself keeps the best weights and saves, so `save_strategy` and `report_to` have no
            effect.
        sweep: As for `tune`. Configurations in its `first` may name training arguments.
        race: As for `tune`. `args.load_best_model_at_end` decides its `keep`. Its `ema` is 0 by default, because
            `Trainer` averages no weights.
        options: Other arguments of `tune`, such as `num_samples`, `backend` or `name`. `storage_path` is by default
            `args.output_dir`.

    Returns:
        The trained model and the best arguments, ready for `Trainer`, and the record of the run.

    Raises:
        ValueError: before any work, with a list of all arguments that cannot be followed; and as for `tune`.
    """
    check_options("tune_trainer", options)
    check_is("args", args, TrainingArguments)
    check_parts(sweep, race)
    given = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "data_collator": data_collator}
    given |= {"processing_class": processing_class, "compute_metrics": compute_metrics}
    given |= {"preprocess_logits_for_metrics": preprocess_logits_for_metrics}
    if trainer_class is None:
        asked = _followed(model, args, space, model_class, given, sweep, race, options)
    else:
        if twice := [f"{name}=: {_DECIDED}" for name in options if name in (*DECIDED, "train")]:
            raise ValueError(_CANNOT + "\n- ".join(twice))
        asked = by_own_trainer(trainer_class, model, model_class, args, space, given, sweep)
        # A trial trains in one process: `Trainer` sets up ranks by itself, not as the workers of a trial.
        race = replace(race, max_workers=1)
    metric, mode = metric_of(args)
    tuned = tune(
        **asked,
        metric=metric,
        mode=mode,
        seed=args.seed,
        race=replace(without_default_ema(race), keep="best" if args.load_best_model_at_end else "last"),
        **_chosen(args, options),
    )
    if trainer_class is None:
        best, finish = arguments_with(args, with_values(args, tuned.best_config)), getattr(model, "trimmed", None)
    else:
        best, finish = made_with(args, tuned.best_config), None
    own: dict[str, Any] = {"_inputs": given, "_finish": finish, "_trainer_class": trainer_class or Trainer}
    return TrainerResult(**vars(tuned), args=best, **own)


def _followed(
    model: Any,
    args: TrainingArguments,
    space: Mapping[str, Any],
    model_class: Any,
    given: Mapping[str, Any],
    sweep: SweepConfig,
    race: RaceConfig,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return arguments of `tune` that follow from the training arguments, and from `given`, arguments of `Trainer`."""
    check_space(space)
    made, wrong = to_space(space, args)
    compute, train_dataset, eval_dataset = (given[n] for n in ("compute_metrics", "train_dataset", "eval_dataset"))
    whole = None if compute is None or args.prediction_loss_only else TrainerMetrics(compute)
    wrong += schedules_refused(args, reached("lr_scheduler_type", made))
    data = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    _check_followed(args, _wrong_metric(args, whole) + wrong + _refused(args, race, options, data))
    model_fn = model_function(model, model_class, own_names(space), args.use_cache)
    with preserved_generators():
        config = sample(made, 1, args.seed)[0]
        first = first_model("model", lambda: model_fn(config), config, nn.Module, "torch.nn.Module")
        collate = collator(first, args, given["data_collator"], given["processing_class"])
        train, validation = loaders(args, collate, train_dataset, eval_dataset)
        few = tree_map(lambda leaf: leaf[:4] if isinstance(leaf, torch.Tensor) else leaf, next(iter(validation(1))))
        sweep = narrow_or_full(sweep, first, lambda: few)
        sweep = replace(sweep, first=tuple(to_known(known, args) for known in sweep.first))
    predictions = predictions_of(args, given["preprocess_logits_for_metrics"])
    return {
        "model_fn": model_fn,
        "space": made | _warmup_epochs(made, args, len(train_dataset)),
        "train_data": train,
        "val_data": validation,
        "objective": trainer_objective(args, None if whole is None else predictions),
        "metrics": whole,
        "max_t": int(args.num_train_epochs),
        "sweep": sweep,
    }


def _wrong_metric(args: TrainingArguments, whole: TrainerMetrics | None) -> list[str]:
    if whole is not None:
        return metrics_refused(args)
    told = f"metric_for_best_model={args.metric_for_best_model!r}: give compute_metrics=, which computes it"
    return [] if metric_of(args)[0] == "val_loss" else [told]


def _check_followed(args: TrainingArguments, wrong: list[str]) -> None:
    refused, idle = unfollowed(args)
    if refused or wrong:
        raise ValueError(_CANNOT + "\n- ".join([*refused, *wrong]))
    if idle:
        warn(f"these training arguments have no effect here: {', '.join(idle)}")


_CANNOT = "tune_trainer() cannot follow:\n- "
_DECIDED = "the training arguments and data sets decide it"


def _refused(
    args: TrainingArguments, race: RaceConfig, options: Mapping[str, Any], data: Mapping[str, Any]
) -> list[str]:
    """Return the reasons why arguments of `tune` and data sets conflict with the training arguments."""
    refused = [f"{name}=: {_DECIDED}" for name in options if name in DECIDED]
    if race.keep == "last" and args.load_best_model_at_end:
        refused.append("race.keep='last': load_best_model_at_end=True says otherwise")
    if race.patience is not None and not args.load_best_model_at_end:
        refused.append(f"race.patience={race.patience}: set load_best_model_at_end=True")
    for name, given in data.items():
        if not (isinstance(given, Sized) and hasattr(given, "__getitem__")) or isinstance(given, Mapping):
            refused.append(f"{name} is a {type(given).__name__}: one data set with a length")
        elif len(given) == 0:
            refused.append(f"{name} is empty: one example or more")
        elif isinstance(given, list | tuple) and given and all(_is_data_set(each) for each in given):
            refused.append(f"{name} is a {type(given).__name__} of {len(given)} data sets: one data set")
    return refused


def _is_data_set(value: Any) -> bool:
    """Tell whether a value is a whole data set, rather than a single example of a data set."""
    rows = isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)
    return rows or isinstance(value, Dataset) or hasattr(value, "column_names")


def _chosen(args: TrainingArguments, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for `tune`, with defaults from the training arguments."""
    precision = next((name for name in PRECISIONS if getattr(args, name)), "fp32")
    chosen = {"storage_path": args.output_dir, "precision": precision, **options}
    if args.use_cpu and chosen.get("backend", "local") == "local":
        chosen["backend"] = LocalBackend("cpu")
    return chosen


def _warmup_epochs(space: Mapping[str, Any], args: TrainingArguments, examples: int) -> dict[str, float]:
    """Return `warmup_epochs` for the space, so that no rung lies before the end of the warm-up.

    Return an empty dict if there is no warm-up, or if `warmup_steps` is searched, because each trial then has its own.
    """
    warmup = warmup_of(args)
    if not warmup or "warmup_steps" in reachable(space):
        return {}
    if warmup < 1:
        return {"warmup_epochs": warmup * args.num_train_epochs}
    largest = max(reached("batch_size", space), default=1)
    return {"warmup_epochs": warmup / math.ceil(examples / largest)}


@dataclass(frozen=True, repr=False)
class TrainerResult(LibraryResult):
    """The outcome of `tune_trainer`: a `TuneResult` for users of `Trainer`.

    Attributes:
        args: The training arguments with the best values. `best_config` has these values under the library's keys, and
            the hyperparameters of the model.
    """

    args: TrainingArguments
    _inputs: dict[str, Any] = field(default_factory=dict)
    _finish: Callable[[nn.Module], nn.Module] | None = None
    _trainer_class: TrainerClass = Trainer

    def model(self) -> nn.Module:
        """Return `best_model()`. LoRA adapters from `peft.adapters` are trimmed to their own ranks."""
        model = self.best_model()
        return model if self._finish is None else self._finish(model)

    def trainer(self, **arguments: Any) -> Trainer:
        """Make a `Trainer`, or a `trainer_class`, with the trained model, the best arguments and the given data.

        `evaluate()` and `predict()` work at once; `train()` would go on from the trained weights.

        Args:
            arguments: More keyword arguments of `Trainer`, which replace those above.
        """
        return self._trainer_class(**{"model": self.model(), "args": self.args, **self._inputs, **arguments})
