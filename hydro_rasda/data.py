"""Data in three forms, read in one way: the same shuffle for every trial, no example left out.

The order of an epoch, and the random numbers that data sets and loaders draw for it, depend on the run's seed and the
epoch alone, so that all trials of a group share each batch, trials are compared on the same batches, and a resumed run
sees what an unbroken one would have seen. Batches are copies: what is written into them, the user's data do not see.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fusion.streams import Stream

from .seeds import derive_seed

Batch = Any
"""A tensor, or any nesting of tuples, lists and dicts of tensors; for supervised learning `(inputs, target)`."""

Data = Sequence[Tensor] | Dataset[Any] | Callable[[int], Iterable[Batch]]
"""What `tune` takes as data: tensors, a map-style dataset, or a function of the batch size that makes a loader."""


class Part(NamedTuple):
    """What one rank takes of a global batch.

    Attributes:
        rows: Which of its examples.
        examples: How many of them count: 0 for a filler, where nothing is left for the rank.
        weight: What to multiply the mean loss over the rows by, so that the ranks' average is the mean over the batch.
    """

    rows: slice
    examples: int
    weight: float


@dataclass(frozen=True)
class Shard:
    """A rank's place among those that train one model together; by default it is alone.

    Attributes:
        rank: From 0.
        world: Number of ranks.
    """

    rank: int = 0
    world: int = 1

    def part(self, examples: int, least: int = 1) -> Part:
        """This rank's part of a global batch.

        Where there is too little for all, the first ranks take it, and the others a filler of the same examples.

        Args:
            examples: Size of the global batch, >= 1.
            least: No rank takes fewer, unless the batch has fewer: batch statistics need 2.

        >>> [Shard(rank, 4).part(5, least=2).examples for rank in range(4)]
        [3, 2, 0, 0]
        >>> [Shard(rank, 4).part(5).weight for rank in range(4)]
        [1.6, 0.8, 0.8, 0.8]
        """
        takers = max(1, min(self.world, examples // least))
        if self.rank >= takers:
            return Part(slice(0, least), 0, 0.0)
        rows = slice(self.rank, None, takers)
        taken = len(range(examples)[rows])
        return Part(rows, taken, taken * self.world / examples)


ALONE = Shard()


class Share(NamedTuple):
    """One rank's part of a global batch, loaded.

    Attributes:
        batch: Its examples, on the device.
        examples: As in `Part`.
        weight: As in `Part`.
    """

    batch: Batch
    examples: int
    weight: float


class Batches(Protocol):
    """Data, ready to be read epoch by epoch.

    It can be pickled; a copy from a pickle holds tensors in the CPU's memory until `on` moves them.
    """

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        """The batches of one shuffled epoch, on the device."""
        ...

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """All examples once, for evaluation."""
        ...

    def shares(self, batch_size: int, epoch: int | None, shard: Shard) -> Iterator[Share]:
        """One rank's part of each batch that one process would read.

        All ranks see the same number of shares. In training, no rank gets a single example where `batch_size` is above
        1 and the batch has more: BatchNorm would refuse it. Where that leaves too few, the last ranks get fillers.

        Args:
            batch_size: Examples of a batch, over all ranks.
            epoch: Which shuffled epoch, to train on; None for all examples once, for evaluation.
            shard: Which rank of how many.
        """
        ...

    def steps(self, batch_size: int) -> int | None:
        """Batches per epoch; None where only reading them tells."""
        ...

    def on(self, device: torch.device) -> Batches:
        """A copy whose batches come on another device."""
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


def move(batch: Batch, device: torch.device, *, wait: bool = False, always: bool = False) -> Batch:
    """A batch, or any nesting of tensors, with all of them on a device.

    Args:
        batch: What is moved.
        device: Where to.
        wait: Whether the copies are there when this returns: what was copied to the CPU can then be read at once.
        always: Whether to copy also what is on the device already.
    """

    def moved(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=not wait, copy=always) if isinstance(leaf, Tensor) else leaf

    return tree_map(moved, batch)


def _apart(make: Callable[[], Iterable[Batch]], seed: int) -> Iterator[Batch]:
    """What an iterable gives, made and read with random numbers of its own: models draw theirs in between."""
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


def _refuse_empty(length: int, argument: str) -> None:
    if length == 0:
        raise ValueError(f"`{argument}` is empty, but must have at least one example")


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


Rows = Tensor | range
"""Indices of examples; in evaluation a range, which is copied faster."""


class _IndexedBatches:
    """Data whose examples have indices, so that a rank loads its own alone."""

    _length: int
    _seed: int
    _device: torch.device

    def _load(self, parts: Sequence[Rows], seed: int) -> Iterator[Batch]:
        """The batches of these examples; the seed is for what a data set draws on the way."""
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
        parts = [shard.part(len(chunk), _least(batch_size, epoch)) for chunk in chunks]
        own_seed = ("rank", shard.rank) if shard.rank else ()
        seed = derive_seed(self._seed, "load", "in order" if epoch is None else epoch, *own_seed)
        loaded = self._load([chunk[part.rows] for chunk, part in zip(chunks, parts)], seed)
        return (Share(batch, part.examples, part.weight) for batch, part in zip(loaded, parts))

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        return (share.batch for share in self.shares(batch_size, epoch, ALONE))

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return (share.batch for share in self.shares(batch_size, None, ALONE))

    def steps(self, batch_size: int) -> int | None:
        return _num_chunks(self._length, batch_size)


def _least(batch_size: int, epoch: int | None) -> int:
    """Examples that a rank needs at least: two where batch statistics may be taken of them."""
    return 2 if epoch is not None and batch_size > 1 else 1


class _TensorBatches(_IndexedBatches):
    def __init__(self, tensors: tuple[Tensor, ...], argument: str, device: torch.device, seed: int) -> None:
        lengths = [len(t) if t.ndim else 0 for t in tensors]
        if len(set(lengths)) != 1:
            raise ValueError(f"`{argument}` has tensors of {lengths} examples, but must have as many of each")
        _refuse_empty(lengths[0], argument)
        self._tensors = tuple(t.to(device) for t in tensors)
        self._length, self._seed, self._device = lengths[0], seed, device

    def _order(self, epoch: int) -> Tensor:
        return super()._order(epoch).to(self._tensors[0].device)

    def _load(self, parts: Sequence[Rows], seed: int) -> Iterator[Batch]:
        return map(self._take, parts)

    def _take(self, rows: Rows) -> Batch:
        at = rows if isinstance(rows, Tensor) else slice(rows.start, rows.stop, rows.step)
        # A slice shares memory with the whole: with the user's tensor, or with what Ray has mapped read-only.
        taken = tuple(t[at] if isinstance(rows, Tensor) else t[at].clone() for t in self._tensors)
        return taken if len(taken) > 1 else taken[0]

    def on(self, device: torch.device) -> Batches:
        moved = copy.copy(self)
        moved._tensors = tuple(t.to(device) for t in self._tensors)
        moved._device = device
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Tensors as bytes in arrays, which pickle's protocol 5, and so Ray, shares instead of copying them."""
        return {**self.__dict__, "_tensors": [_to_bytes(t) for t in self._tensors]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed: list[_Bytes] = state["_tensors"]
        self.__dict__.update(state, _tensors=tuple(_from_bytes(p) for p in packed))

    def describe(self) -> str:
        return "tensors " + ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self._tensors)


class _Bytes(NamedTuple):
    content: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]


def _to_bytes(tensor: Tensor) -> _Bytes:
    plain = tensor.detach().cpu().contiguous()
    return _Bytes(plain.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def _from_bytes(packed: _Bytes) -> Tensor:
    with warnings.catch_warnings():
        # Torch warns of memory that must not be written to; nothing here does.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(packed.content).view(packed.dtype).reshape(packed.shape)


class _DatasetBatches(_IndexedBatches):
    def __init__(self, dataset: Dataset[Any], argument: str, device: torch.device, seed: int) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(f"`{argument}` is a {type(dataset).__name__} without a length; give a map-style Dataset")
        _refuse_empty(len(dataset), argument)
        self._dataset, self._length, self._device, self._seed = dataset, len(dataset), device, seed

    def _load(self, parts: Sequence[Rows], seed: int) -> Iterator[Batch]:
        rows = [part.tolist() if isinstance(part, Tensor) else list(part) for part in parts]
        loader = DataLoader(self._dataset, batch_sampler=rows)
        return (move(batch, self._device) for batch in _apart(lambda: loader, seed))

    def on(self, device: torch.device) -> Batches:
        moved = copy.copy(self)
        moved._device = device
        return moved

    def describe(self) -> str:
        return f"{type(self._dataset).__name__} of {self._length}"


class _LoaderBatches:
    def __init__(
        self, make_loader: Callable[[int], Iterable[Batch]], argument: str, device: torch.device, seed: int
    ) -> None:
        self._make_loader, self._argument, self._device, self._seed = make_loader, argument, device, seed

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        """Seeded, so that a loader that shuffles does so alike for every trial; copied, for it may keep its batches."""
        batches = 0
        for batch in _apart(lambda: self._loader(batch_size), derive_seed(self._seed, "shuffle", epoch)):
            batches += 1
            yield move(batch, self._device, always=True)
        _refuse_empty(batches, self._argument)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return self.epoch(batch_size, 0)

    def shares(self, batch_size: int, epoch: int | None, shard: Shard) -> Iterator[Share]:
        """Each rank loads whole batches: how a loader makes them, only the loader knows."""
        for batch in self.epoch(batch_size, epoch or 0):
            length = batch_length(batch)
            part = shard.part(length, _least(batch_size, epoch))
            mine = batch if shard.world == 1 else _rows_of(batch, part.rows, length)
            yield Share(mine, part.examples, part.weight)

    def steps(self, batch_size: int) -> int | None:
        try:
            return len(self._loader(batch_size))  # type: ignore[arg-type]
        except TypeError:  # a DataLoader of a stream has a length in name only
            return None

    def on(self, device: torch.device) -> Batches:
        moved = copy.copy(self)
        moved._device = device
        return moved

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
