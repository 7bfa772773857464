"""A map-style dataset, of which each batch is loaded when it is needed: by this process, or ahead by others."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from fusion.streams import Stream
from hydro_rasda.data.batch_splits import IndexedBatches, Rows, length_of
from hydro_rasda.data.batches import Batch, move
from hydro_rasda.seeds import derive_seed

MOST_WORKERS = 4
"""Processes that load for one model on a GPU where nobody says how many."""


class DatasetBatches(IndexedBatches):
    """Batches of a map-style dataset, put together by torch's `default_collate`."""

    def __init__(
        self, dataset: Dataset[Any], argument: str, device: torch.device, seed: int, workers: int | None = None
    ) -> None:
        if not isinstance(dataset, Sized):
            raise ValueError(f"`{argument}` is a {type(dataset).__name__} without a length; give a map-style Dataset")
        length = length_of(dataset, argument)
        self._dataset, self._length, self._device, self._seed = dataset, length, device, seed
        self._workers = workers

    def _load(self, parts: Sequence[Rows], seed: int) -> Iterator[Batch]:
        rows = [part.tolist() if isinstance(part, Tensor) else list(part) for part in parts]
        loader = DataLoader(
            _InBatches(self._dataset, rows, seed),
            batch_size=None,
            num_workers=default_workers(self._device) if self._workers is None else self._workers,
            pin_memory=self._device.type == "cuda",
            # It draws a number that nothing uses, which must not come from what models draw from.
            generator=torch.Generator(),
        )
        return (move(batch, self._device) for batch in loader)

    def on(self, device: torch.device) -> DatasetBatches:
        moved = copy.copy(self)
        moved._device = device
        return moved

    def describe(self) -> str:
        return f"{type(self._dataset).__name__} of {self._length}"


def default_workers(device: torch.device) -> int:
    """Processes that load ahead: a few for a GPU; none for a CPU, whose cores have models to train."""
    return min(MOST_WORKERS, os.cpu_count() or 1) if device.type == "cuda" else 0


class _InBatches(Dataset[Batch]):
    """A dataset of batches, each with random numbers of its own: whichever process loads it draws the same."""

    def __init__(self, examples: Dataset[Any], rows: Sequence[Sequence[int]], seed: int) -> None:
        self._examples, self._rows, self._seed = examples, rows, seed

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Batch:
        rows = self._rows[number]
        with Stream(derive_seed(self._seed, number)).drawn_from():
            several = getattr(self._examples, "__getitems__", None)
            return default_collate(several(rows) if several else [self._examples[row] for row in rows])
