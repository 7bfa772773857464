"""Batches as `Trainer` makes them, and model functions from a `model_init` or a `PretrainedConfig`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import (
    DataCollatorWithPadding,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    SequenceFeatureExtractor,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import RemoveColumnsCollator, number_of_arguments
from transformers.utils.generic import find_labels

from hydro_rasda.common.argument_checks import require
from hydro_rasda.integrations.shared import Collator, EvalLoader, TrainLoader
from hydro_rasda.integrations.transformers.arguments import sampling_of


@dataclass(frozen=True)
class _AsDict:
    """Wraps a collator so that batches are plain dicts, because the library finds no tensors in other mappings."""

    collate: Collator

    def __call__(self, features: list[Any]) -> Any:
        batch = self.collate(features)
        return dict(batch) if isinstance(batch, Mapping) else batch  # the objective refuses others by name


def collator(model: nn.Module, args: TrainingArguments, given: Collator | None, processing_class: Any) -> Collator:
    """Return the collator that `Trainer` would use; it drops columns that the model does not take."""
    pads = isinstance(processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor)
    collate: Any = given or (DataCollatorWithPadding(processing_class) if pads else default_data_collator)
    if args.remove_unused_columns:
        inner = base_of(model)
        labels = find_labels(type(inner)) if args.label_names is None else args.label_names
        columns = [*inspect.signature(inner.forward).parameters, "label", "label_ids", *labels]
        collate = RemoveColumnsCollator(collate, columns)
    return _AsDict(collate)


def base_of(model: Any) -> nn.Module:
    """Return the model to which `peft` added adapters, or the model itself if it has no adapters."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def loaders(
    args: TrainingArguments, collate: Collator, train_dataset: Any, eval_dataset: Any
) -> tuple[TrainLoader, EvalLoader]:
    """Return training and validation data as loader functions for `tune`."""
    workers, shuffle = args.dataloader_num_workers, sampling_of(args) == "random"
    parts = args.gradient_accumulation_steps
    train = TrainLoader(train_dataset, collate, parts, args.dataloader_drop_last, shuffle, workers)
    return train, EvalLoader(eval_dataset, collate, args.per_device_eval_batch_size, workers)


@dataclass(frozen=True)
class FromInit:
    """A `model_fn(config)` made from `Trainer`'s `model_init`, which takes nothing or the trial's hyperparameters."""

    init: Callable[..., nn.Module]
    use_cache: bool

    def __call__(self, config: Mapping[str, Any]) -> nn.Module:
        model = self.init(config) if number_of_arguments(self.init) else self.init()
        return _without_cache(model, self.use_cache)


@dataclass(frozen=True)
class FromConfig:
    """A `model_fn(config)` made from a `PretrainedConfig`. Its attributes that `own` names are hyperparameters."""

    base: PretrainedConfig
    model_class: Any
    own: tuple[str, ...]
    use_cache: bool

    def __call__(self, config: Mapping[str, Any]) -> nn.Module:
        changed = copy.deepcopy(self.base)
        for name in config.keys() & {*self.own}:  # `config` lacks the keys of branches that it did not take
            setattr(changed, name, config[name])
        automatic = self.model_class.__name__.startswith("Auto")
        model: nn.Module = self.model_class.from_config(changed) if automatic else self.model_class(changed)
        return _without_cache(model, self.use_cache)


def _without_cache(model: nn.Module, use_cache: bool) -> nn.Module:
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig):
        config.use_cache = use_cache
    return model


def model_function(model: Any, model_class: Any, own: tuple[str, ...], use_cache: bool) -> FromInit | FromConfig:
    """Return the function with which `tune` builds models. `own` names the hyperparameters of the model.

    If `model_class` is None, the `architectures` of a `PretrainedConfig` name the class.
    """
    if not isinstance(model, PretrainedConfig):
        callable_ = callable(model) and not isinstance(model, nn.Module)
        rule = "a function that makes a model (`model_init`), or a PretrainedConfig; a model itself serves one trial"
        require(callable_, "model", type(model).__name__, rule)
        require(model_class is None, "model_class", model_class, "left out, unless `model` is a PretrainedConfig")
        return FromInit(model, use_cache)
    if model_class is None:
        names = model.architectures or []
        model_class = getattr(transformers, names[0], None) if names else None
        rule = "given, such as AutoModelForCausalLM: the configuration's `architectures` name no class of transformers"
        require(model_class is not None, "model_class", None, rule)
    unknown = [name for name in own if not hasattr(model, name)]
    rule = f"names of TrainingArguments, or attributes of {type(model).__name__}"
    require(not unknown, "space", unknown, rule)
    return FromConfig(model, model_class, own, use_cache)
