"""Loaders of other libraries as functions of the batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from hydro_rasda.data import Batch

Collator = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class TrainLoader:
    """`make_loader(batch_size)`, where a batch is what one update is made of.

    Attributes:
        parts: That another library would accumulate the batch's gradient over.
        drop_last: True if the last part is left out where it is smaller.
        shuffle: True if each epoch has an order of its own.
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
    """`make_loader(batch_size)`, whose batches are of one size, whatever it is asked for."""

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
