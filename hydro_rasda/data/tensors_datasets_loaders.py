"""The three forms of data that `tune` takes: tensors in memory, a map-style dataset, or a user's own loaders.

Tensors stay on the device, and batches are indexed there. Batches of a dataset are loaded when they are needed, by this
process, or ahead by worker processes. A user's loaders, one for each batch size, shuffle and load in their own way, but
with a given seed.
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from fusion.streams import Stream
from fusion.structure.objects_of_tensors import LOOKED_INTO, fields, look_into, with_fields
from hydro_rasda.common.argument_checks import binds, require
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.data.batch_splits import IndexedBatches, Rows, check_length, least, length_of
from hydro_rasda.data.batches import Batch, Batches, Data, Shard, Share, batch_length, cut_off, move
from hydro_rasda.data.can_be_pickled import can_be_pickled
from hydro_rasda.data.open_files import OwnFiles


class TensorBatches(IndexedBatches):
    """Tensors with the same number of examples. A batch is a tuple that has some rows of each tensor."""

    def __init__(self, tensors: tuple[Tensor, ...], argument: str, device: torch.device, seed: int) -> None:
        lengths = [len(t) if t.ndim else 0 for t in tensors]
        if len(set(lengths)) != 1:
            raise ValueError(f"`{argument}` has tensors of {lengths} examples, but must have as many of each")
        check_length(lengths[0], argument)
        for i, tensor in enumerate(tensors):
            require(not tensor.is_meta, f"{argument}[{i}].device", "meta", "one where a tensor has data")
        self._tensors = tuple(t.detach().to(device) for t in tensors)
        self._differentiable = tuple(t.requires_grad for t in tensors)
        self._length, self._seed, self._device = lengths[0], seed, device

    def _order(self, epoch: int) -> Tensor:
        return super()._order(epoch).to(self._tensors[0].device)

    def _load(self, parts: Sequence[Rows], seed: int) -> Iterator[Batch]:
        # Indices of folds are on the CPU. Move all of them before the first batch, so that no later batch waits.
        device = self._tensors[0].device
        return map(self._take, [part.to(device) if isinstance(part, Tensor) else part for part in parts])

    def _take(self, rows: Rows) -> Batch:
        at = rows if isinstance(rows, Tensor) else slice(rows.start, rows.stop, rows.step)
        # A slice would share the memory of the user's tensor, or read-only memory of Ray, so clone it.
        taken = [t[at] if isinstance(rows, Tensor) else t[at].clone() for t in self._tensors]
        return tuple(t.requires_grad_(asked) for t, asked in zip(taken, self._differentiable, strict=True))

    def on(self, device: torch.device) -> TensorBatches:
        moved = copy.copy(self)
        moved._tensors = tuple(t.to(device) for t in self._tensors)
        moved._device = device
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with tensors as arrays of bytes, which pickle's protocol 5 (and so Ray) does not copy."""
        return {**self.__dict__, "_tensors": [to_bytes(t) for t in self._tensors]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed: list[Bytes] = state["_tensors"]
        self.__dict__.update(state, _tensors=tuple(from_bytes(p) for p in packed))

    def describe(self) -> str:
        return "tensors " + ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in self._tensors)


class Bytes(NamedTuple):
    """A tensor in a form that pickle's protocol 5 shares without a copy; see `to_bytes`."""

    content: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]


def to_bytes(tensor: Tensor) -> Bytes:
    """Pack a tensor as an array of bytes; a contiguous CPU tensor shares its memory with the array."""
    plain = tensor.detach().cpu().contiguous()
    return Bytes(plain.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def from_bytes(packed: Bytes) -> Tensor:
    """Return the tensor that `to_bytes` packed; it shares the memory of the bytes."""
    return _tensor(packed.content, "content").view(packed.dtype).reshape(packed.shape)


MOST_WORKERS = 4
"""By default, at most this number of worker processes load data for one model on a GPU."""


class DatasetBatches(IndexedBatches):
    """Batches of a map-style dataset, collated as by torch's `default_collate`."""

    def __init__(
        self, dataset: Dataset[Any], argument: str, device: torch.device, seed: int, workers: int | None = None
    ) -> None:
        if not isinstance(dataset, Sized):
            raise ValueError(f"`{argument}` is a {type(dataset).__name__} without a length; give a map-style Dataset")
        length = length_of(dataset, argument)
        self._dataset, self._length, self._device, self._seed = dataset, length, device, seed
        self._workers = workers
        self._can_be_sent: bool | None = None  # None: not checked yet

    def _load(self, parts: Sequence[Rows], seed: int) -> Iterator[Batch]:
        rows = [part.tolist() if isinstance(part, Tensor) else list(part) for part in parts]
        workers = self._default_workers() if self._workers is None else self._workers
        loader = DataLoader(
            _InBatches(self._dataset, rows, seed),
            batch_size=None,
            num_workers=workers if len(rows) > 1 else 0,
            pin_memory=workers > 0 and self._device.type == "cuda",
            worker_init_fn=OwnFiles(),
            # The loader draws a seed that nothing uses. With its own generator, it leaves the models' random numbers
            # alone.
            generator=torch.Generator(),
        )
        return (move(batch, self._device) for batch in loader)

    def _default_workers(self) -> int:
        """Return the default number of worker processes; 0 if the data cannot be pickled or are on a GPU."""
        most = default_workers(self._device)
        if most and self._can_be_sent is None:
            self._can_be_sent = can_be_pickled(self._dataset, tensors_of_gpus=False)
        return most if self._can_be_sent else 0

    def on(self, device: torch.device) -> DatasetBatches:
        moved = copy.copy(self)
        moved._device = device
        return moved

    def describe(self) -> str:
        return f"{type(self._dataset).__name__} of {self._length}"


def default_workers(device: torch.device) -> int:
    """Return the number of worker processes for a device: a few for a GPU; 0 for a CPU, whose cores train models.

    It is at most the number of cores that this process may use, because torch would warn of more worker processes.
    """
    if device.type != "cuda":
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, cores)


class _InBatches(Dataset[Batch]):
    """A dataset of batches. Each batch has its own seed, so that any process draws the same random numbers for it."""

    def __init__(self, examples: Dataset[Any], rows: Sequence[Sequence[int]], seed: int) -> None:
        self._examples, self._rows, self._seed = examples, rows, seed

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Batch:
        rows = self._rows[number]
        with Stream(derive_seed(self._seed, number)).drawn_from():
            several = getattr(self._examples, "__getitems__", None)
            return cut_off(_collated(several(rows) if several else [self._examples[row] for row in rows]))


def _collated(examples: Sequence[Any]) -> Batch:
    """Collate examples as `default_collate` does, and objects of tensors field by field."""
    look_into(examples[0])
    ways: dict[Any, Any] = {**default_collate_fn_map}
    ways |= {kind: _collated_objects for kind in LOOKED_INTO if not issubclass(kind, Mapping)}
    return collate(examples, collate_fn_map=ways)


def _collated_objects(examples: Sequence[Any], *, collate_fn_map: dict[Any, Any]) -> Any:
    each = [fields(example) for example in examples]
    joined = {}
    for name in each[0]:
        values = [found[name] for found in each]
        missing = all(value is None for value in values)  # if only some values are None, torch's `collate` raises
        joined[name] = None if missing else collate(values, collate_fn_map=collate_fn_map)
    return with_fields(type(examples[0]), joined)


class LoaderBatches:
    """The batches of loaders. A user's function of the batch size makes a new loader for each epoch."""

    def __init__(
        self, make_loader: Callable[[int], Iterable[Batch]], argument: str, device: torch.device, seed: int
    ) -> None:
        self._make_loader, self._argument, self._device, self._seed = make_loader, argument, device, seed

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        """Yield the batches of a loader, at most as many as its length, because a loader may never end.

        The loader is seeded, so that it shuffles in the same way for every trial. Batches are copied, because a loader
        may keep its batches.
        """
        made: list[Iterable[Batch]] = []

        def make() -> Iterable[Batch]:
            made.append(self._loader(batch_size))
            return made[0]

        batches, length = 0, None
        for batch in _apart(make, derive_seed(self._seed, "shuffle", epoch)):
            if batches == 0:  # only once, because a sampler may iterate to find its length
                length = _length(made[0])
            if batches == length:
                break
            batches += 1
            yield move(cut_off(batch), self._device, always=True)
        if batches == 0:
            raise self._empty(batch_size)

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        return self.epoch(batch_size, 0)

    def last(self, batch_size: int) -> Iterator[Batch]:
        """Yield nothing, because the last batch of a loader cannot be read without the others."""
        return iter(())

    def shares(self, batch_size: int, epoch: int | None, shard: Shard) -> Iterator[Share]:
        """Yield this rank's rows of each batch; every rank loads whole batches, because loaders have no indices."""
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
        if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, OwnFiles):
            loader.worker_init_fn = OwnFiles(loader.worker_init_fn)
        return loader

    def describe(self) -> str:
        return f"loaders from {getattr(self._make_loader, '__qualname__', type(self._make_loader).__name__)}"


def _length(loader: Iterable[Batch]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # for example a loader of an iterable dataset without a length
        return None


def _apart(make: Callable[[], Iterable[Batch]], seed: int) -> Iterator[Batch]:
    """Read the iterable that `make` returns, with random numbers from `seed`, so that those of models do not change."""
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
    """Return the examples `rows` of a batch of `length` examples; tensors without a row for each stay whole."""

    def take(leaf: Any) -> Any:
        return leaf[rows].contiguous() if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == length else leaf

    return tree_map(take, batch)


def make_batches(
    data: Data, argument: str, device: torch.device, seed: int, loader_workers: int | None = None
) -> Batches:
    """Make `Batches` of a user's data, whichever of the three forms they have.

    Args:
        data: See `Data`. Tensors are moved to the device and stay there.
        argument: The data's name in errors, such as "train_data".
        loader_workers: Processes that load batches of a Dataset ahead, as `num_workers` of a DataLoader; None for
            `default_workers`. Batches do not depend on it.

    Raises:
        ValueError: If the data have none of the three forms, are empty, or have tensors of different lengths.
    """
    if isinstance(data, (DataLoader, IterableDataset)):
        raise ValueError(
            f"`{argument}` is a {type(data).__name__}, whose batch size or order is fixed; give tensors, a map-style "
            "Dataset, or a function such as `lambda batch_size: DataLoader(dataset, batch_size)`"
        )
    if isinstance(data, (tuple, list)) and data and all(isinstance(t, (Tensor, np.ndarray)) for t in data):
        return TensorBatches(tuple(_tensor(t, f"{argument}[{i}]") for i, t in enumerate(data)), argument, device, seed)
    tables = any(hasattr(of, "to_numpy") for of in (data, *(data if isinstance(data, (tuple, list)) else ())))
    if isinstance(data, Dataset) or (_is_sequence(data) and not tables):
        return DatasetBatches(data, argument, device, seed, loader_workers)  # type: ignore[arg-type]
    if callable(data) and not isinstance(data, type) and binds(inspect.signature(data), 1):
        return LoaderBatches(data, argument, device, seed)
    # Refuse tables, because `table[n]` in pandas returns a column, or the row with this label, not the n-th example.
    hint = ". `.to_numpy()` makes arrays of tables" if tables else ""
    hint += ". This function does not take one argument" if inspect.isfunction(data) or inspect.ismethod(data) else ""
    splitter = ", or a splitter such as `KFold(5)`" if argument == "val_data" else ""
    raise ValueError(
        f"`{argument}` is a {_kind(data)}, but must be tensors (inputs, target), a map-style Dataset, or a function "
        f"`make_loader(batch_size)`{splitter}{hint}"
    )


def _kind(data: object) -> str:
    """Return the name of the data's class, with the classes of the items of a tuple or list, for an error."""
    name, parts = type(data).__name__, data if isinstance(data, (tuple, list)) else ()
    return f"{name} of {', '.join(dict.fromkeys(type(of).__name__ for of in parts))}" if parts else name


def _tensor(data: Any, argument: str) -> Tensor:
    if isinstance(data, np.ndarray) and (min(data.strides, default=0) < 0 or not data.dtype.isnative):
        # torch refuses arrays with negative strides, or with the byte order of other machines.
        data = np.ascontiguousarray(data, data.dtype.newbyteorder("="))
    try:
        with warnings.catch_warnings():
            # The warning is about writing to such an array, but the library never writes to data.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensor = torch.as_tensor(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{argument}` is an array of {data.dtype}, but must be one of numbers: {error}") from error
    layout = "nested" if tensor.is_nested else tensor.layout
    require(layout == torch.strided, f"{argument}.layout", layout, "a dense tensor's; a Dataset may make others of it")
    return tensor


def _is_sequence(data: object) -> bool:
    """Return whether data can be read like a map-style Dataset: a list of examples, or another library's data set."""
    if isinstance(data, (str, bytes, Mapping, type)) or (isinstance(data, tuple) and data):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")
