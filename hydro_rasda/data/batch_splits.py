"""Data whose examples have indices: which of them each batch of an epoch holds, and each rank's share of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.data.batches import ALONE, Batch, Shard, Share, batch_length

Rows = Tensor | range
"""Indices of examples; in evaluation a range, which is copied faster."""


class IndexedBatches:
    """Data whose examples have indices, so that a rank loads its own alone."""

    _length: int
    _seed: int
    _device: torch.device

    def _load(self, parts: Sequence[Rows], seed: int) -> Iterator[Batch]:
        """The batches of these examples; the seed is for what a data set draws on the way."""
        raise NotImplementedError

    def on(self, device: torch.device) -> IndexedBatches:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError

    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(
            self._length, generator=torch.Generator().manual_seed(derive_seed(self._seed, "shuffle", epoch))
        )

    def _split(self, size: int, epoch: int | None) -> Sequence[Rows]:
        if epoch is None:
            every = range(self._length)
            return [every[i : i + size] for i in range(0, self._length, size)]
        return _chunks(self._order(epoch), size)

    def shares(self, batch_size: int, epoch: int | None, shard: Shard) -> Iterator[Share]:
        chunks = self._split(batch_size, epoch)
        parts = [shard.part(len(chunk), least(batch_size, epoch)) for chunk in chunks]
        own_seed = ("rank", shard.rank) if shard.rank else ()
        seed = derive_seed(self._seed, "load", "in order" if epoch is None else epoch, *own_seed)
        loaded = self._load([chunk[part.rows] for chunk, part in zip(chunks, parts)], seed)
        return (Share(batch, part.examples, part.weight) for batch, part in zip(loaded, parts))

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        return (share.batch for share in self.shares(batch_size, epoch, ALONE))

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return (share.batch for share in self.shares(batch_size, None, ALONE))

    def last(self, batch_size: int) -> Iterator[Batch]:
        seed = derive_seed(self._seed, "load", "last")
        return self._load(self._split(batch_size, None)[-1:], seed)

    def steps(self, batch_size: int) -> int | None:
        return num_chunks(self._length, batch_size)


def least(batch_size: int, epoch: int | None) -> int:
    """Examples that a rank needs at least: two where batch statistics may be taken of them."""
    return 2 if epoch is not None and batch_size > 1 else 1


def num_parts(batch: Batch, batch_size: int, parts: int) -> int:
    """Return into how many parts a training batch is split, if those of `batch_size` examples are split into `parts`.

    A smaller batch, such as the last one or a rank's share, has fewer: no part is left with a single example, for
    which BatchNorm has no statistics. They may be single examples where those of a whole batch are.

    >>> [num_parts(torch.zeros(examples), 8, 4) for examples in (8, 7, 5, 1)]
    [4, 3, 2, 1]
    """
    if parts == 1 or batch_size < 2 * parts:
        return parts
    return max(1, min(parts, batch_length(batch) // 2))


def _chunks(order: Tensor, batch_size: int) -> list[Tensor]:
    """Split an epoch into batches; what remains is a smaller last batch, a single example joins the batch before it.

    (Batch statistics of one example do not exist: BatchNorm would refuse it.)

    >>> [len(c) for c in _chunks(torch.arange(7), 3)], [len(c) for c in _chunks(torch.arange(8), 3)]
    ([3, 4], [3, 3, 2])
    """
    chunks = list(order.split(batch_size))
    if len(chunks) > 1 and len(chunks[-1]) == 1 and batch_size > 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks


def num_chunks(length: int, batch_size: int) -> int:
    """Return how many batches an epoch of so many examples has."""
    full, rest = divmod(length, batch_size)
    return full + (rest > 1 or (rest == 1 and full == 0))


MOST_EXAMPLES = 10**9
"""Shuffled in memory, an epoch of these takes 8 GB."""


def length_of(data: Any, argument: str) -> int:
    """The number of examples of data that have a length; ValueError if `len()` gives none, or too many."""
    try:
        length = len(data)
    except Exception as error:
        told = f"`len({argument})` raises {type(error).__name__}: {error}"
        raise ValueError(f"{told}; a {type(data).__name__} must have an integer >= 1 as its length") from error
    check_length(length, argument)
    return length


def check_length(length: int, argument: str) -> None:
    """Refuse data without examples, or with more than can be shuffled."""
    if length == 0:
        raise ValueError(f"`{argument}` is empty, but must have at least one example")
    require(length <= MOST_EXAMPLES, f"len({argument})", length, f"at most {MOST_EXAMPLES} examples")
