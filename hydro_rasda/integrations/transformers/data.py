"""Batches as `Trainer` makes them: its collator, its columns, its last batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, TrainingArguments, default_data_collator
from transformers.trainer_utils import RemoveColumnsCollator
from transformers.utils.generic import find_labels

from hydro_rasda.data import Batch
from hydro_rasda.integrations.transformers.arguments import sampling_of

Collator = Callable[[list[Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class TrainLoader:
    """`make_loader(batch_size)`, where a batch is what `Trainer` makes one update of.

    Attributes:
        dataset: Examples.
        collate: Makes a batch of them.
        at_once: Examples of each of the parts that `Trainer` accumulates gradients over.
        drop_last: Whether the last part is left out where it is smaller.
        shuffle: Whether each epoch has an order of its own.
        workers: Processes that load ahead.
    """

    dataset: Any
    collate: Collator
    parts: int
    drop_last: bool
    shuffle: bool
    workers: int

    def __call__(self, batch_size: int) -> DataLoader[Batch]:
        most = len(self.dataset)
        if self.drop_last:
            most -= most % (batch_size // self.parts)
        batches = _Batches(len(self.dataset), most, batch_size, self.shuffle)
        return DataLoader(self.dataset, batch_sampler=batches, collate_fn=self.collate, num_workers=self.workers)


@dataclass(frozen=True)
class EvalLoader:
    """`make_loader(batch_size)`, whose batches are of `per_device_eval_batch_size`, whatever it is asked for."""

    dataset: Any
    collate: Collator
    size: int
    workers: int

    def __call__(self, batch_size: int) -> DataLoader[Batch]:
        return DataLoader(self.dataset, self.size, collate_fn=self.collate, num_workers=self.workers)


class _Batches(Sampler[list[int]]):
    def __init__(self, length: int, most: int, size: int, shuffle: bool) -> None:
        self._length, self._most, self._size, self._shuffle = length, most, size, shuffle

    def __len__(self) -> int:
        return -(-self._most // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._length).tolist() if self._shuffle else [*range(self._length)]
        return (order[i : min(i + self._size, self._most)] for i in range(0, self._most, self._size))


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
