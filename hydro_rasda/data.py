"""Data in three forms, read in one way: the same shuffle for every trial, no example left out.

The order of an epoch depends on the run's seed and the epoch alone, so that all trials of a group share each batch,
trials are compared on the same batches, and a resumed run sees what an unbroken one would have seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .seeds import derive_seed, preserved_generators, seed_generators

Batch = Any
"""A tensor, or any nesting of tuples, lists and dicts of tensors; for supervised learning `(inputs, target)`."""

Data = Sequence[Tensor] | Dataset[Any] | Callable[[int], Iterable[Batch]]
"""What `tune` takes as data: tensors, a map-style dataset, or a function of the batch size that makes a loader."""


class Batches(Protocol):
    """Data, ready to be read epoch by epoch."""

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        """The batches of one shuffled epoch, on the device."""
        ...

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """All examples once, for evaluation."""
        ...

    def steps(self, batch_size: int) -> int | None:
        """Batches per epoch; None where only reading them tells."""
        ...

    def describe(self) -> str:
        """One line, equal for data of equal form: kept with a run to recognise it."""
        ...


def make_batches(data: Data, argument: str, device: torch.device, seed: int) -> Batches:
    """Wrap a user's data.

    Args:
        data: See `Data`. Tensors are moved to the device and stay there.
        argument: Its name, for messages.
        device: Where batches are needed.
        seed: Seeds the shuffles.

    Raises:
        TypeError: where the data has none of the three forms.
        ValueError: where it is empty, or its tensors have different lengths.
    """
    if isinstance(data, (DataLoader, IterableDataset)):
        raise TypeError(
            f"`{argument}` is a {type(data).__name__}, whose batch size or order is fixed; give tensors, a map-style "
            "Dataset, or a function `make_loader(batch_size)`"
        )
    if isinstance(data, (tuple, list)) and data and all(isinstance(t, (Tensor, np.ndarray)) for t in data):
        return _TensorBatches(tuple(torch.as_tensor(t) for t in data), argument, device, seed)
    if isinstance(data, Dataset) or _is_sequence(data):
        return _DatasetBatches(data, argument, device, seed)  # type: ignore[arg-type]
    if _takes_batch_size(data):
        return _LoaderBatches(data, argument, device, seed)  # type: ignore[arg-type]
    raise TypeError(
        f"`{argument}` is a {type(data).__name__}, but must be tensors (inputs, target), a map-style Dataset, or a "
        "function `make_loader(batch_size)`"
    )


def _is_sequence(data: object) -> bool:
    """Whether data that is no Dataset reads like one: a list of examples, or another library's data set."""
    if isinstance(data, (str, bytes, Mapping, type)) or (isinstance(data, tuple) and data):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _takes_batch_size(data: object) -> bool:
    if not callable(data) or isinstance(data, type):
        return False
    try:
        inspect.signature(data).bind(1)
    except TypeError:
        return False
    return True


def batch_length(batch: Batch) -> int:
    """Number of examples in a batch: the first dimension of its first tensor."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise TypeError(f"a batch is {type(batch).__name__} without a tensor of one or more dimensions")


def move(batch: Batch, device: torch.device) -> Batch:
    """A batch with all its tensors on a device."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def _refuse_empty(length: int, argument: str) -> None:
    if length == 0:
        raise ValueError(f"`{argument}` is empty, but must have at least one example")


def _order(length: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(derive_seed(seed, "shuffle", epoch)))


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


def _num_chunks(length: int, batch_size: int) -> int:
    full, rest = divmod(length, batch_size)
    return full + (rest > 1 or (rest == 1 and full == 0))


class _TensorBatches:
    def __init__(self, tensors: tuple[Tensor, ...], argument: str, device: torch.device, seed: int) -> None:
        lengths = [len(t) if t.ndim else 0 for t in tensors]
        if len(set(lengths)) != 1:
            raise ValueError(f"`{argument}` has tensors of {lengths} examples, but must have as many of each")
        _refuse_empty(lengths[0], argument)
        self._tensors = tuple(t.to(device) for t in tensors)
        self._length, self._seed = lengths[0], seed

    def _take(self, rows: Tensor | slice) -> Batch:
        taken = tuple(t[rows] for t in self._tensors)
        return taken if len(taken) > 1 else taken[0]

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        order = _order(self._length, self._seed, epoch).to(self._tensors[0].device)
        return map(self._take, _chunks(order, batch_size))

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return (self._take(slice(i, i + batch_size)) for i in range(0, self._length, batch_size))

    def steps(self, batch_size: int) -> int | None:
        return _num_chunks(self._length, batch_size)

    def describe(self) -> str:
        return "tensors " + ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self._tensors)


class _DatasetBatches:
    def __init__(self, dataset: Dataset[Any], argument: str, device: torch.device, seed: int) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(f"`{argument}` is a {type(dataset).__name__} without a length; give a map-style Dataset")
        _refuse_empty(len(dataset), argument)
        self._dataset, self._length, self._device, self._seed = dataset, len(dataset), device, seed

    def _load(self, chunks: Sequence[Tensor]) -> Iterator[Batch]:
        loader = DataLoader(self._dataset, batch_sampler=[c.tolist() for c in chunks])
        return (move(batch, self._device) for batch in loader)

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        return self._load(_chunks(_order(self._length, self._seed, epoch), batch_size))

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return self._load(torch.arange(self._length).split(batch_size))

    def steps(self, batch_size: int) -> int | None:
        return _num_chunks(self._length, batch_size)

    def describe(self) -> str:
        return f"{type(self._dataset).__name__} of {self._length}"


class _LoaderBatches:
    def __init__(
        self, make_loader: Callable[[int], Iterable[Batch]], argument: str, device: torch.device, seed: int
    ) -> None:
        self._make_loader, self._argument, self._device, self._seed = make_loader, argument, device, seed

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        """Seeded, so that a loader that shuffles does so alike for every trial."""
        with preserved_generators():
            seed_generators(derive_seed(self._seed, "shuffle", epoch))
            batches = iter(self._loader(batch_size))
            first = next(batches, None)
        if first is None:
            _refuse_empty(0, self._argument)
        yield move(first, self._device)
        for batch in batches:
            yield move(batch, self._device)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return self.epoch(batch_size, 0)

    def steps(self, batch_size: int) -> int | None:
        try:
            return len(self._loader(batch_size))  # type: ignore[arg-type]
        except TypeError:  # a DataLoader of a stream has a length in name only
            return None

    def _loader(self, batch_size: int) -> Iterable[Batch]:
        loader = self._make_loader(batch_size)
        if not isinstance(loader, Iterable):
            raise TypeError(
                f"`{self._argument}` is a function that returned a {type(loader).__name__}, but must be a function "
                "`make_loader(batch_size)` that returns batches"
            )
        return loader

    def describe(self) -> str:
        return f"loaders from {getattr(self._make_loader, '__qualname__', type(self._make_loader).__name__)}"
