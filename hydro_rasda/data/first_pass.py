"""One pass over the data before training, bounded in time, so that bad data do not stop a run after hours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from time import monotonic
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from hydro_rasda.common.argument_checks import require
from hydro_rasda.data.batches import Batch, Batches, batch_length

SECONDS = 5.0
"""Seconds to read each of the two data sets.

This suffices for data in memory. If reading takes longer, only the start of the data is read, and their last batch if
they have indices.
"""


def unlike(batches: Batches, batch_size: int, argument: str) -> Iterator[tuple[str, Batch]]:
    """Read data once, the last batch first, and yield unusual batches, on which a model may fail.

    A batch is unusual if it has a new structure, an infinite or NaN number, or a size or an integer outside the range
    of the batches before it. Errors name `argument`, such as "train_data".

    Yields:
        The name of the batch in words, and the batch.

    Raises:
        ValueError: If a batch cannot be read or has no examples, if the data can be read only once, or if loaders have
            neither an end nor a length.
    """
    ends = monotonic() + SECONDS
    ranges: Ranges = {}
    last, in_order = batches.last(batch_size), batches.in_order(batch_size)
    for name, source in chain([("the last batch", last)], ((f"batch {number}", in_order) for number in count())):
        with naming_batch(argument, name, batch_size):
            batch = next(source, source)
            if batch is not source:
                require(batch_length(batch) > 0, "examples", 0, "1 or more in each batch")
        if batch is source and source is last:
            continue
        if batch is source:
            with naming_batch(argument, "its first batch, read once more,", batch_size):
                next(batches.in_order(batch_size))
            return
        if _stands_out(batch, ranges):
            yield name, batch
        if monotonic() > ends:
            break
    if batches.steps(batch_size) is None:
        raise ValueError(
            f"`{argument}` makes loaders without a length (`__len__`), and no end was seen within {SECONDS:g} s: give "
            "them one, after which an epoch ends"
        )


@contextmanager
def naming_batch(argument: str, name: str, batch_size: int) -> Iterator[None]:
    """Turn any error within the context into a ValueError that says at which batch `argument` could not be read."""
    try:
        yield
    except (Exception, SystemExit) as error:
        told = f"`{argument}` raises at {name} of {batch_size} examples: {type(error).__name__}: {error}"
        raise ValueError(told) from error


def non_finite(batch: Batch) -> str:
    """Describe in words the first infinite or NaN number of a batch; return "" if it has none."""
    for leaf in tree_leaves(batch):
        if _is_dense(leaf) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            at = (~leaf.isfinite()).nonzero()[0].tolist()
            return f"{leaf[tuple(at)].item()} at {at} of a tensor {tuple(leaf.shape)}"
    return ""


def _is_dense(leaf: Any) -> TypeGuard[Tensor]:
    """Return whether a leaf of a batch is a dense tensor; sparse tensors are not checked."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided


Ranges = dict[tuple[object, ...], tuple[int, int]]
"""Map each measure of a batch's leaf (such as the size of an axis) to its smallest and largest value so far."""


def _stands_out(batch: Batch, ranges: Ranges) -> bool:
    """Return whether a batch is unusual, see `unlike`; extend `ranges` by its sizes and integers."""
    beyond = bool(non_finite(batch))
    for key, low, high in _measures(batch):
        lowest, highest = ranges.get(key, (low, high))
        beyond = beyond or key not in ranges or low < lowest or high > highest
        ranges[key] = (min(low, lowest), max(high, highest))
    return beyond


def _measures(batch: Batch) -> Iterator[tuple[tuple[object, ...], int, int]]:
    """Yield (key, smallest, largest) for each leaf of a batch, for each axis of the leaf, and for its integers.

    The key tells what was measured, and where in the batch. For a leaf itself, both numbers are 0, because its key
    alone tells whether the structure is new.
    """
    leaves, structure = tree_flatten(batch)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            yield (str(structure), i, type(leaf)), 0, 0
            continue
        key = (str(structure), i, leaf.dtype, leaf.ndim)
        yield key, 0, 0
        yield from (((*key, axis), size, size) for axis, size in enumerate(leaf.shape))
        if _is_dense(leaf) and leaf.numel() and not leaf.is_floating_point() and not leaf.is_complex():
            low, high = (int(value) for value in torch.aminmax(leaf.to(torch.int64)))
            yield (*key, "values"), low, high
