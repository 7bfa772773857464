"""Sort `TrainingArguments` into followed, refused and without effect here; convert a space over them.

Unknown fields, such as those of a subclass, are refused unless they have their default.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from fusion.keys import KEYS as OF_THE_LIBRARY
from hydro_rasda.common.argument_checks import is_number, require
from hydro_rasda.settings.config import Mode
from hydro_rasda.space.branches import is_branching, reachable, with_defaults
from hydro_rasda.space.domains import choice, is_a, is_grid
from hydro_rasda.space.space import reached

OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
"""Values of `optim` -> the library's optimizers. Both versions of torch's AdamW compute the same."""

KEYS = {
    "learning_rate": "lr",
    "per_device_train_batch_size": "batch_size",
    "optim": "optimizer",
    "weight_decay": "weight_decay",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "max_grad_norm": "grad_clip",
}
"""Training arguments -> their keys in the library's configurations."""

SCHEDULED = ("lr_scheduler_type", "warmup_steps")
"""Training arguments that keep their names in the library's configurations."""

SAMPLING = ("random", "sequential")

PRECISIONS = ("fp16", "bf16", "tf32")

_FOLLOWED = {
    *KEYS,
    *SCHEDULED,
    *("warmup_ratio", "lr_scheduler_kwargs", "gradient_accumulation_steps", "num_train_epochs", "seed"),
    *PRECISIONS,
    *("label_smoothing_factor", "per_device_eval_batch_size", "dataloader_drop_last", "dataloader_num_workers"),
    *("remove_unused_columns", "label_names", "train_sampling_strategy", "use_cache", "use_cpu", "no_cuda"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "output_dir"),
    *("do_train", "do_eval", "do_predict"),  # only a user's script reads these; `Trainer` does not
}

_WITHOUT_EFFECT = {
    *("eval_strategy", "evaluation_strategy", "eval_steps", "eval_delay"),
    *("eval_on_start", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object"),
    *("prediction_loss_only", "include_for_metrics", "batch_eval_metrics", "average_tokens_across_devices"),
    *("report_to", "run_name", "project", "logging_dir", "log_level", "log_level_replica", "log_on_each_node"),
    *("disable_tqdm", "include_num_input_tokens_seen", "include_tokens_per_second", "skip_memory_metrics", "debug"),
    *("overwrite_output_dir", "enable_jit_checkpoint", "ignore_data_skip", "local_rank", "length_column_name"),
    *("restore_callback_states_from_checkpoint", "torch_empty_cache_steps", "push_to_hub", "liger_kernel_config"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
    *("torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("dataloader_multiprocessing_context", "dataloader_in_order"),
}
_WITHOUT_EFFECT_PREFIXES = ("logging_", "save_", "hub_", "push_to_hub_", "trackio_", "ddp_")
"""Arguments in `_WITHOUT_EFFECT` or with these prefixes have no effect on the result of a step. They change what is
printed, saved, sent or compiled, or the speed of a step."""

_SEVERAL = "several devices train by `race=RaceConfig(workers=...)`, which split a model with `strategy='fsdp'`"
_REASONS = {
    "max_steps": "a training has whole epochs: use `num_train_epochs`",
    "optim_args": "optimizers have torch's defaults",
    "auto_find_batch_size": "the batch size is a hyperparameter",
    "resume_from_checkpoint": "a run goes on by its `name`",
    "data_seed": "`seed` determines all",
    "deepspeed": _SEVERAL,
    "fsdp": _SEVERAL,
}


def unfollowed(args: TrainingArguments) -> tuple[list[str], list[str]]:
    """Return the reasons why arguments are refused, and the names of changed arguments that have no effect."""
    default, refused, idle = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu), [], []
    for name in (field.name for field in dataclasses.fields(args)):
        value = getattr(args, name)
        if name in _FOLLOWED or value == getattr(default, name):
            continue
        if name in _WITHOUT_EFFECT or name.startswith(_WITHOUT_EFFECT_PREFIXES):
            idle.append(name)
        else:
            why = _REASONS.get(name, "tune_trainer() does not follow it")
            refused.append(f"{name}={value!r}: {why}")
    return refused + _values_refused(args), idle


def _values_refused(args: TrainingArguments) -> list[str]:
    refused = []
    if word(args.optim) not in OPTIMIZERS:
        refused.append(f"optim={word(args.optim)!r}: one of {', '.join(OPTIMIZERS)}")
    if word(args.lr_scheduler_type) in _STATEFUL:
        refused.append(f"lr_scheduler_type={word(args.lr_scheduler_type)!r}: it is no function of the step")
    sampling = sampling_of(args)
    if sampling not in SAMPLING:
        refused.append(f"train_sampling_strategy={sampling!r}: one of {', '.join(SAMPLING)}")
    if args.num_train_epochs != int(args.num_train_epochs) or args.num_train_epochs < 1:
        refused.append(f"num_train_epochs={args.num_train_epochs!r}: a whole number of epochs >= 1")
    if len(asked := [name for name in PRECISIONS if getattr(args, name)]) > 1:
        refused.append(f"{', '.join(f'{name}=True' for name in asked)}: one of them")
    return refused


def metrics_refused(args: TrainingArguments) -> list[str]:
    """Return the reasons why arguments about `compute_metrics` are refused."""
    refused = []
    if args.batch_eval_metrics:
        refused.append("batch_eval_metrics=True: compute_metrics is given the whole validation set")
    if args.include_for_metrics:
        refused.append(f"include_for_metrics={args.include_for_metrics!r}: compute_metrics is given logits and labels")
    return refused


def epochs_of(args: TrainingArguments, space: Mapping[str, Any]) -> int:
    """Return the epochs of the longest training, which depend on the space if it searches `num_train_epochs`."""
    steps = reachable(space).get("max_steps", [args.max_steps])
    require(steps == [-1], "max_steps", steps[0], f"left out: {_REASONS['max_steps']}")
    epochs = reached("num_train_epochs", space) or [args.num_train_epochs]
    whole = all(is_number(each) and each == int(each) >= 1 for each in epochs)
    require(whole, "num_train_epochs", max(epochs), "a whole number of epochs >= 1")
    return int(max(epochs))


_STATEFUL = {"reduce_lr_on_plateau", "greedy"}


def schedule_types() -> list[str]:
    """Return the values of `lr_scheduler_type` that can be followed, because their factor is a function of the step."""
    return [kind.value for kind in SchedulerType if kind.value not in _STATEFUL]


def sampling_of(args: TrainingArguments) -> str:
    """Return how `Trainer` orders examples: `train_sampling_strategy`, or `group_by_length` of older transformers."""
    if getattr(args, "group_by_length", False):
        return "group_by_length"
    return word(getattr(args, "train_sampling_strategy", "random"))


def to_key(name: str, args: TrainingArguments, value: Any) -> Any:
    """Convert the value of a training argument to the value of the library's key (see `KEYS`)."""
    if name == "optim":
        return OPTIMIZERS.get(word(value), value)
    if name == "per_device_train_batch_size":
        return value * args.gradient_accumulation_steps
    if name == "max_grad_norm":
        return value or None
    return value


def from_key(name: str, args: TrainingArguments, value: Any) -> Any:
    """Convert the value of a library's key back to the value of the training argument (the inverse of `to_key`)."""
    if name == "optim":
        return next(optim for optim in (word(args.optim), *OPTIMIZERS) if OPTIMIZERS[optim] == value)
    if name == "per_device_train_batch_size":
        return value // args.gradient_accumulation_steps
    if name == "max_grad_norm":
        return value or 0.0
    return value


def metric_of(args: TrainingArguments) -> tuple[str, Mode]:
    """Return `metric` and `mode` for `tune`: "eval_f1" and "f1" become "val_f1"."""
    name = (args.metric_for_best_model or "loss").removeprefix("eval_")
    greater = args.greater_is_better
    return f"val_{name}", "max" if (not name.endswith("loss") if greater is None else greater) else "min"


def warmup_of(args: TrainingArguments) -> float:
    """Return the number of warm-up steps. A value below 1 is their share of all steps."""
    return float(args.warmup_steps or getattr(args, "warmup_ratio", None) or 0)


def word(value: Any) -> str:
    """Return the text of an argument that may be a text or a member of an enumeration of transformers."""
    return str(getattr(value, "value", value))


_CHOICES: dict[str, Callable[[], list[str]]] = {"optim": lambda: list(OPTIMIZERS), "lr_scheduler_type": schedule_types}


def to_known(config: Any, args: TrainingArguments) -> Any:
    """Convert a configuration of `sweep.first` to the library's keys; its names may be those of training arguments."""
    if not isinstance(config, Mapping):
        return config  # `tune` raises an error for this value
    return {KEYS.get(name, name): to_key(name, args, value) for name, value in config.items()}


def to_space(space: Mapping[str, Any], args: TrainingArguments) -> tuple[dict[str, Any], list[str]]:
    """Convert a space over training arguments to a space of `tune`, in which other arguments are constants.

    Returns the space, and the reasons why names or values are refused.
    """
    made, refused = _translated(space, args)
    return with_defaults(made, {key: to_key(name, args, vars(args)[name]) for name, key in KEYS.items()}), refused


def _translated(space: Mapping[str, Any], args: TrainingArguments) -> tuple[dict[str, Any], list[str]]:
    known, made, refused = vars(args), dict[str, Any](), list[str]()
    for name, domain in space.items():
        if is_branching(domain):
            branches = [_translated(branch, args) for branch in domain.categories]
            made[name] = choice([branch for branch, _ in branches])
            refused += [why for _, wrong in branches for why in wrong]
            continue
        values = _values(domain)
        wrong = [value for value in values or () if name in _CHOICES and value not in _CHOICES[name]()]
        if wrong:
            refused.append(f"space[{name!r}] has {wrong[0]!r}: one of {', '.join(_CHOICES[name]())}")
        elif name in KEYS:
            accumulates = name == "per_device_train_batch_size" and args.gradient_accumulation_steps > 1
            if values is None and (accumulates or name == "optim"):
                refused.append(f"space[{name!r}] is {domain!r}: a choice() here")
            else:
                made[KEYS[name]] = _mapped(domain, partial(to_key, name, args))
        elif name in SCHEDULED:
            made[name] = domain
        elif name in known:
            refused.append(f"space[{name!r}]: this training argument is the same for all trials here")
        elif name in OF_THE_LIBRARY:
            named = next((own for own, key in KEYS.items() if key == name), None)
            refused.append(f"space[{name!r}]: " + (f"use {named!r}" if named else "it is no training argument"))
        else:
            made[name] = domain
    return made, refused


def own_names(space: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in a user's space that are no training arguments, so they belong to the model."""
    return tuple(name for name in reachable(space) if name not in KEYS and name not in SCHEDULED)


def with_values(args: TrainingArguments, config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a configuration from the space of `to_space` back to values of training arguments."""
    values = {name: from_key(name, args, config[key]) for name, key in KEYS.items() if key in config}
    return values | {name: config[name] for name in SCHEDULED if name in config}


def arguments_with(args: TrainingArguments, values: Mapping[str, Any]) -> TrainingArguments:
    """Return a copy of `args` with the new `values`. Names in `values` that are no training arguments are ignored."""
    changed = copy.copy(args)
    for name in [name for name in values if hasattr(args, name)]:
        setattr(changed, name, values[name])
    return changed


def made_with(args: TrainingArguments, values: Mapping[str, Any]) -> TrainingArguments:
    """Return a copy of `args` as if it had been made with the new `values`.

    Other attributes follow from them: `mixed_precision`, for example, follows from `fp16` and `bf16`.
    """
    changed = arguments_with(args, values)
    changed.__post_init__()
    return changed


def _values(domain: Any) -> list[Any] | None:
    """Return all values of a domain; None if it is a range."""
    if is_a(domain, "Categorical"):
        return list(domain.categories)
    if is_grid(domain):
        return list(domain["grid_search"])
    return None if is_a(domain, "Domain") else [domain]


def _mapped(domain: Any, change: Callable[[Any], Any]) -> Any:
    if is_a(domain, "Categorical"):
        return choice([change(value) for value in domain.categories])
    if is_grid(domain):
        return {"grid_search": [change(value) for value in domain["grid_search"]]}
    return domain if is_a(domain, "Domain") else change(domain)
