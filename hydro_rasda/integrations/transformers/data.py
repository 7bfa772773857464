"""Batches as `Trainer` makes them: its collator, its columns, its last batches."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, TrainingArguments, default_data_collator
from transformers.trainer_utils import RemoveColumnsCollator
from transformers.utils.generic import find_labels

from hydro_rasda.integrations.loaders import Collator, EvalLoader, TrainLoader
from hydro_rasda.integrations.transformers.arguments import sampling_of


@dataclass(frozen=True)
class _AsDict:
    """A collator whose batches are plain dicts: others' are not looked into for tensors."""

    collate: Collator

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        return dict(self.collate(features))


def collator(model: nn.Module, args: TrainingArguments, given: Collator | None, processing_class: Any) -> Collator:
    """The collator that `Trainer` would use, which leaves out columns that the model does not take."""
    tokenizer = isinstance(processing_class, PreTrainedTokenizerBase)
    collate: Any = given or (DataCollatorWithPadding(processing_class) if tokenizer else default_data_collator)
    if args.remove_unused_columns:
        inner = base_of(model)
        labels = find_labels(type(inner)) if args.label_names is None else args.label_names
        columns = [*inspect.signature(inner.forward).parameters, "label", "label_ids", *labels]
        collate = RemoveColumnsCollator(collate, columns)
    return _AsDict(collate)


def base_of(model: Any) -> nn.Module:
    """The model that adapters of `peft` are on, or the model itself."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def loaders(
    args: TrainingArguments, collate: Collator, train_dataset: Any, eval_dataset: Any
) -> tuple[TrainLoader, EvalLoader]:
    """Both data sets as `tune` takes them."""
    workers, shuffle = args.dataloader_num_workers, sampling_of(args) == "random"
    parts = args.gradient_accumulation_steps
    train = TrainLoader(train_dataset, collate, parts, args.dataloader_drop_last, shuffle, workers)
    return train, EvalLoader(eval_dataset, collate, args.per_device_eval_batch_size, workers)
