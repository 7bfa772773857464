"""Split indexed data into the batches of an epoch, and each batch into the shares of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.data.batches import ALONE, Batch, Shard, Share, batch_length

Rows = Tensor | range
"""Indices of examples. Evaluation uses a range, because a slice is copied faster than single rows."""


class IndexedBatches:
    """Data whose examples have indices, so that each rank loads only its own examples."""

    _length: int
    _seed: int
    _device: torch.device

    def _load(self, parts: Sequence[Rows], seed: int) -> Iterator[Batch]:
        """Yield a batch for each item of `parts`, the indices of its examples; `seed` seeds what a data set draws."""
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
    """Return the fewest examples of a batch that a rank may get: 2 in training, which BatchNorm needs, else 1.

    With a `batch_size` of 1, it is 1 in training, too.
    """
    return 2 if epoch is not None and batch_size > 1 else 1


def num_parts(batch: Batch, batch_size: int, parts: int) -> int:
    """Return into how many micro-batches a training batch is split: `parts` if it has `batch_size` examples.

    A smaller batch, such as the last one or a rank's share, may have fewer, so that no micro-batch has a single
    example, for which BatchNorm has no statistics. If micro-batches of a whole batch have single examples anyway, a
    smaller batch is split into `parts`, too.

    >>> [num_parts(torch.zeros(examples), 8, 4) for examples in (8, 7, 5, 1)]
    [4, 3, 2, 1]
    """
    if parts == 1 or batch_size < 2 * parts:
        return parts
    return max(1, min(parts, batch_length(batch) // 2))


def _chunks(order: Tensor, batch_size: int) -> list[Tensor]:
    """Split `order`, the shuffled indices of an epoch's examples, into batches.

    The last batch may be smaller. A single remaining example joins the batch before it, because BatchNorm refuses a
    batch of one example.

    >>> [len(c) for c in _chunks(torch.arange(7), 3)], [len(c) for c in _chunks(torch.arange(8), 3)]
    ([3, 4], [3, 3, 2])
    """
    chunks = list(order.split(batch_size))
    if len(chunks) > 1 and len(chunks[-1]) == 1 and batch_size > 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks


def num_chunks(length: int, batch_size: int) -> int:
    """Return the number of batches in an epoch of `length` examples."""
    full, rest = divmod(length, batch_size)
    return full + (rest > 1 or (rest == 1 and full == 0))


MOST_EXAMPLES = 10**9
"""Largest number of examples of a data set. Their shuffled indices take 8 GB."""


def length_of(data: Any, argument: str) -> int:
    """Return the number of examples of `data`; an error names `argument`.

    Raises:
        ValueError: If `len()` fails, is 0, or is above `MOST_EXAMPLES`.
    """
    try:
        length = len(data)
    except Exception as error:
        told = f"`len({argument})` raises {type(error).__name__}: {error}"
        raise ValueError(f"{told}; a {type(data).__name__} must have an integer >= 1 as its length") from error
    check_length(length, argument)
    return length


def check_length(length: int, argument: str) -> None:
    """Raise ValueError for data without examples, or with more than `MOST_EXAMPLES`."""
    if length == 0:
        raise ValueError(f"`{argument}` is empty, but must have at least one example")
    require(length <= MOST_EXAMPLES, f"len({argument})", length, f"at most {MOST_EXAMPLES} examples")
