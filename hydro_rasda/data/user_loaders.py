"""A user's own loaders, one for each batch size: they shuffle and load as they like, on a seed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fusion.streams import Stream
from hydro_rasda.data.batch_splits import least
from hydro_rasda.data.batches import Batch, Batches, Share, batch_length, move
from hydro_rasda.data.rank_shards import Shard
from hydro_rasda.seeds import derive_seed


class LoaderBatches:
    """The batches of loaders that a function of the batch size makes."""

    def __init__(
        self, make_loader: Callable[[int], Iterable[Batch]], argument: str, device: torch.device, seed: int
    ) -> None:
        self._make_loader, self._argument, self._device, self._seed = make_loader, argument, device, seed

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        """At most as many batches as the loader says that it has: it may go on for ever.

        Seeded, so that a loader that shuffles does so alike for every trial; copied, for it may keep its batches.
        """
        made: list[Iterable[Batch]] = []

        def make() -> Iterable[Batch]:
            made.append(self._loader(batch_size))
            return made[0]

        batches = 0
        for batch in _apart(make, derive_seed(self._seed, "shuffle", epoch)):
            if batches == _length(made[0]):
                break
            batches += 1
            yield move(batch, self._device, always=True)
        if batches == 0:
            raise self._empty(batch_size)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return self.epoch(batch_size, 0)

    def last(self, batch_size: int) -> Iterator[Batch]:
        """Only reading all tells which it is."""
        return iter(())

    def shares(self, batch_size: int, epoch: int | None, shard: Shard) -> Iterator[Share]:
        """Each rank loads whole batches: how a loader makes them, only the loader knows."""
        for batch in self.epoch(batch_size, epoch or 0):
            length = batch_length(batch)
            part = shard.part(length, least(batch_size, epoch))
            mine = batch if shard.world == 1 else _rows_of(batch, part.rows, length)
            yield Share(mine, part.examples, part.weight)

    def steps(self, batch_size: int) -> int | None:
        length = _length(self._loader(batch_size))
        if length == 0:
            raise self._empty(batch_size)
        return length

    def _empty(self, batch_size: int) -> ValueError:
        return ValueError(
            f"`{self._argument}` is empty, where it is asked for batches of {batch_size} examples. Each call must make "
            "a new loader of one batch or more: an iterator that was read has none left, and `drop_last=True` needs "
            f"{batch_size} examples"
        )

    def on(self, device: torch.device) -> Batches:
        moved = copy.copy(self)
        moved._device = device
        return moved

    def _loader(self, batch_size: int) -> Iterable[Batch]:
        loader = self._make_loader(batch_size)
        if not isinstance(loader, Iterable):
            raise ValueError(
                f"`{self._argument}` is a function that returned a {type(loader).__name__}, but must be a function "
                "`make_loader(batch_size)` that returns batches"
            )
        return loader

    def describe(self) -> str:
        return f"loaders from {getattr(self._make_loader, '__qualname__', type(self._make_loader).__name__)}"


def _length(loader: Iterable[Batch]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # a DataLoader of a stream has a length in name only
        return None


def _apart(make: Callable[[], Iterable[Batch]], seed: int) -> Iterator[Batch]:
    """Make and read an iterable with random numbers of its own: models draw theirs in between."""
    stream = Stream(seed)
    with stream.drawn_from():
        batches = iter(make())
    while True:
        with stream.drawn_from():
            batch = next(batches, stream)
        if batch is stream:
            return
        yield batch


def _rows_of(batch: Batch, rows: slice, length: int) -> Batch:
    """Some examples of a batch; tensors that have no row for each example stay whole."""

    def take(leaf: Any) -> Any:
        return leaf[rows].contiguous() if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == length else leaf

    return tree_map(take, batch)
