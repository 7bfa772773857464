"""The treatment of each of `TrainingArguments` (it is followed, has no effect here, or is refused), and their space.

Fields that this version does not know, such as those of a subclass, are refused where they are not at their default.
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
from hydro_rasda.settings.config import Mode
from hydro_rasda.space.branches import is_branching, reachable, with_defaults
from hydro_rasda.space.domains import choice, is_a, is_grid

OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
"""`optim`, in the library's words; both of torch's AdamW compute the same."""

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
"""Arguments that are a key of the library's configurations."""

SCHEDULED = ("lr_scheduler_type", "warmup_steps")
"""Arguments that keep their names there."""

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
    *("do_train", "do_eval", "do_predict"),  # for scripts: `Trainer` does not read them
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
"""They change what is printed, saved, sent or compiled, or how fast a step is, not what it computes."""

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
    """Arguments that cannot be followed: why each is refused, in words; and names of others, which have no effect."""
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
    """Values of arguments about `compute_metrics` that cannot be followed, where there is one."""
    refused = []
    if args.batch_eval_metrics:
        refused.append("batch_eval_metrics=True: compute_metrics is given the whole validation set")
    if args.include_for_metrics:
        refused.append(f"include_for_metrics={args.include_for_metrics!r}: compute_metrics is given logits and labels")
    return refused


_STATEFUL = {"reduce_lr_on_plateau", "greedy"}


def schedule_types() -> list[str]:
    """Values of `lr_scheduler_type` that can be followed: those that are a function of the step."""
    return [kind.value for kind in SchedulerType if kind.value not in _STATEFUL]


def sampling_of(args: TrainingArguments) -> str:
    """In which order examples are read: `train_sampling_strategy`, which older versions call `group_by_length`."""
    if getattr(args, "group_by_length", False):
        return "group_by_length"
    return word(getattr(args, "train_sampling_strategy", "random"))


def to_key(name: str, args: TrainingArguments, value: Any) -> Any:
    """A value of an argument as the library's key has it: see `KEYS`."""
    if name == "optim":
        return OPTIMIZERS.get(word(value), value)
    if name == "per_device_train_batch_size":
        return value * args.gradient_accumulation_steps
    if name == "max_grad_norm":
        return value or None
    return value


def from_key(name: str, args: TrainingArguments, value: Any) -> Any:
    """Return the value that `to_key` was given."""
    if name == "optim":
        return next(optim for optim in (word(args.optim), *OPTIMIZERS) if OPTIMIZERS[optim] == value)
    if name == "per_device_train_batch_size":
        return value // args.gradient_accumulation_steps
    if name == "max_grad_norm":
        return value or 0.0
    return value


def metric_of(args: TrainingArguments) -> tuple[str, Mode]:
    """(`metric`, `mode`) of `tune`: "eval_f1", or "f1", is "val_f1" here."""
    name = (args.metric_for_best_model or "loss").removeprefix("eval_")
    greater = args.greater_is_better
    return f"val_{name}", "max" if (not name.endswith("loss") if greater is None else greater) else "min"


def warmup_of(args: TrainingArguments) -> float:
    """Steps of the warm-up, or, below 1, their share of all steps."""
    return float(args.warmup_steps or getattr(args, "warmup_ratio", None) or 0)


def word(value: Any) -> str:
    """Return the word of an argument that may be a member of an enumeration of the library's."""
    return str(getattr(value, "value", value))


_CHOICES: dict[str, Callable[[], list[str]]] = {"optim": lambda: list(OPTIMIZERS), "lr_scheduler_type": schedule_types}


def to_space(space: Mapping[str, Any], args: TrainingArguments) -> tuple[dict[str, Any], list[str]]:
    """The space that `tune` searches, where other arguments keep their values; and why names or values are refused."""
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
    """Names in a user's space that are no training arguments: the model's."""
    return tuple(name for name in reachable(space) if name not in KEYS and name not in SCHEDULED)


def with_values(args: TrainingArguments, config: Mapping[str, Any]) -> dict[str, Any]:
    """The training arguments that a configuration of `to_space`'s has values for."""
    values = {name: from_key(name, args, config[key]) for name, key in KEYS.items() if key in config}
    return values | {name: config[name] for name in SCHEDULED if name in config}


def arguments_with(args: TrainingArguments, values: Mapping[str, Any]) -> TrainingArguments:
    """Return a copy of the arguments with those of the values that have their names."""
    changed = copy.copy(args)
    for name in [name for name in values if hasattr(args, name)]:
        setattr(changed, name, values[name])
    return changed


def _values(domain: Any) -> list[Any] | None:
    """All values that it can take; None where they are no list."""
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
