"""Folds of one data set, made by a scikit-learn splitter; each fold is read as a data set."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fusion.streams import Stream
from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.data.batch_splits import IndexedBatches, Rows, num_chunks
from hydro_rasda.data.batches import Batch, Batches, Data

MOST_FOLDS = 100
"""Largest number of folds. More are a mistake (such as leave-one-out): every configuration trains once per fold."""

SHORTEST = 0.5
"""The smallest training set of a fold must have at least this share of the examples of the largest one.

Epochs of all folds have the size of the smallest training set.
"""


@runtime_checkable
class Splitter(Protocol):
    """A scikit-learn splitter, such as `KFold(5)`, or an object with the same two methods."""

    def split(self, X: Any, y: Any = None) -> Any:
        """Return pairs of index arrays: the training examples and the validation examples of each fold."""
        ...

    def get_n_splits(self) -> int:
        """Return the number of pairs."""
        ...


class Fold(NamedTuple):
    """Indices of a fold's training examples and of its validation examples."""

    train: Tensor
    val: Tensor


class RowsOf(IndexedBatches):
    """Some examples of a data set, as a data set.

    Args:
        rows: Indices of the examples in `base`.
        common: The smallest number of rows of any fold: training rows if `rows` are training rows, else validation
            rows. Each training epoch draws `common` of the examples anew. In evaluation, the first `common` examples
            form batches whose sizes are equal in all folds. The remaining examples form further batches.
    """

    def __init__(self, base: IndexedBatches, rows: Tensor, seed: int, common: int) -> None:
        self._base, self._rows, self._seed, self._common = base, rows, seed, common
        self._length, self._device = len(rows), base._device

    def _order(self, epoch: int) -> Tensor:
        return super()._order(epoch)[: self._common]

    def _split(self, size: int, epoch: int | None) -> Sequence[Rows]:
        if epoch is not None:
            return super()._split(size, epoch)
        shared, rest = range(self._common), range(self._common, self._length)
        return [part[i : i + size] for part in (shared, rest) for i in range(0, len(part), size)]

    def _load(self, parts: Sequence[Rows], seed: int) -> Iterator[Batch]:
        rows = [self._rows[p if isinstance(p, Tensor) else slice(p.start, p.stop, p.step)] for p in parts]
        return self._base._load(rows, seed)

    def steps(self, batch_size: int) -> int | None:
        return num_chunks(self._common, batch_size)

    def on(self, device: torch.device) -> RowsOf:
        return RowsOf(self._base.on(device), self._rows, self._seed, self._common)

    def describe(self) -> str:
        return self._base.describe()


@dataclass(frozen=True)
class Folds:
    """A data set and its folds.

    Attributes:
        rows: The indices of each fold.
        words: The splitter, as its `repr` shows it.
    """

    base: IndexedBatches
    rows: tuple[Fold, ...]
    words: str

    def __len__(self) -> int:
        return len(self.rows)

    def data(self, at: int, seed: int) -> tuple[RowsOf, RowsOf]:
        """Return the training and validation data of fold `at`, shuffled by `seed`."""
        train, val = self.rows[at]
        common = Fold(*(min(map(len, of_each)) for of_each in zip(*self.rows, strict=True)))  # type: ignore[arg-type]
        return RowsOf(self.base, train, seed, common[0]), RowsOf(self.base, val, seed, common[1])  # type: ignore[arg-type]

    def nothing(self) -> RowsOf:
        return RowsOf(self.base, torch.zeros(0, dtype=torch.int64), 0, 0)

    def on(self, device: torch.device) -> Folds:
        return replace(self, base=self.base.on(device))

    def indices(self) -> tuple[Tensor, ...]:
        """Return the indices of all folds. They identify the data of a run, so that a later call recognizes them."""
        return tuple(part for fold in self.rows for part in fold)


Some = TypeVar("Some", bound=Batches)


def reseeded(batches: Some, seed: int) -> Some:
    """Return a copy of the data that is shuffled by `seed`, not by the seed of the original."""
    other = copy.copy(batches)
    other._seed = seed  # type: ignore[attr-defined]
    return other


def is_splitter(data: object) -> bool:
    """Tell whether `data` is a scikit-learn splitter, such as `KFold(5)`, or a splitter's class."""
    return all(callable(getattr(data, name, None)) for name in ("split", "get_n_splits"))


def make_folds(splitter: Any, data: Data, batches: Batches, seed: int) -> Folds:
    """Split the training data into the folds of a splitter.

    If the splitter draws random numbers and has no `random_state`, the numbers depend on the run's seed.
    """
    if isinstance(splitter, type):
        raise ValueError(
            f"`val_data` is the class {splitter.__name__}, but must be a splitter: `{splitter.__name__}()`"
        )
    if not isinstance(batches, IndexedBatches):
        told = f"`val_data` is {splitter!r}, which splits by indices, but `train_data` is a function that makes loaders"
        raise ValueError(f"{told}; give tensors or a map-style Dataset")
    length = batches._length
    with Stream(derive_seed(seed, "folds")).drawn_from():
        pairs = _pairs(splitter, data, length)
    require(len(pairs) >= 2, "val_data", splitter, f"a splitter that makes two folds or more; it makes {len(pairs)}")
    rule = f"a splitter that makes at most {MOST_FOLDS} folds; it makes {len(pairs)}"
    require(len(pairs) <= MOST_FOLDS, "val_data", splitter, rule)
    folds = tuple(Fold(*(_indices(splitter, part, length) for part in pair)) for pair in pairs)
    for number, fold in enumerate(folds):
        _check(splitter, number, fold)
    shortest, longest = (choose(len(fold.train) for fold in folds) for choose in (min, max))
    rule = f"a splitter whose training sets are about equally large; they have {shortest} to {longest} examples"
    require(shortest >= SHORTEST * longest, "val_data", splitter, rule)
    return Folds(batches, folds, repr(splitter))


def _pairs(splitter: Any, data: Any, length: int) -> list[Any]:
    """Return the splitter's pairs of index arrays (training, validation); raise ValueError if the splitter fails.

    Examples are read only if the splitter fails without targets, and the targets can be found nowhere else.
    """
    try:
        inputs, targets = _inputs_and_targets(data, length)
        # `split` would advance a generator that the splitter holds as its `random_state`.
        own = copy.deepcopy(splitter) if hasattr(splitter, "random_state") else splitter
        try:
            return [tuple(pair) for pair in own.split(inputs, targets)]
        except Exception:
            if targets is not None or _tensors(data):
                raise
        # The splitter has failed without targets, so read the targets from the examples, and try again.
        return [tuple(pair) for pair in own.split(inputs, np.array([_target(data[i]) for i in range(length)]))]
    except Exception as error:
        told = f"`val_data` is {splitter!r}, which fails on the {length} examples of `train_data`"
        raise ValueError(f"{told} with {type(error).__name__}: {error}") from error


def _inputs_and_targets(data: Any, length: int) -> tuple[Any, Any]:
    """Return arrays of inputs and targets, which a splitter takes, without reading examples.

    Inputs are zeros if the data are not tensors. Targets are None if they are unknown.
    """
    inputs, targets = np.zeros((length, 1)), _targets(data, length)
    if tensors := _tensors(data):
        first, last = (_array(torch.as_tensor(of).detach().cpu()) for of in (tensors[0], tensors[-1]))
        inputs, targets = first, last if len(tensors) > 1 else None
    return inputs, targets


def _targets(data: Any, length: int) -> Any:
    """Return the attribute `targets` of a data set as an array; None if it does not have one target per example."""
    try:
        found = np.asarray(getattr(data, "targets", None))
    except (TypeError, ValueError):  # for example targets of different lengths (boxes), or on a GPU
        return None
    return found if found.ndim and len(found) == length else None


def _array(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16


def _tensors(data: Any) -> tuple[Any, ...]:
    """Return the tensors that data consist of; () if data are a sequence of examples."""
    parts = data if isinstance(data, (tuple, list)) else getattr(data, "tensors", ())
    return tuple(parts) if all(isinstance(of, (Tensor, np.ndarray)) for of in parts) else ()


def _target(example: Any) -> Any:
    value = example[1]
    return value.item() if isinstance(value, Tensor) else value


def _indices(splitter: Any, part: Any, length: int) -> Tensor:
    found = np.asarray(part)
    whole = found.ndim == 1 and (np.issubdtype(found.dtype, np.integer) or not len(found))
    within = whole and not len(found[(found < 0) | (found >= length)])
    rule = f"a splitter that makes pairs of indices below {length}, the number of training examples"
    require(within, "val_data", splitter, rule)
    return torch.from_numpy(found.astype(np.int64))


def _check(splitter: Any, number: int, fold: Fold) -> None:
    sizes = f"fold {number} has {len(fold.train)} and {len(fold.val)}"
    rule = f"a splitter that leaves 2 examples or more to train on, and 1 or more to validate on; {sizes}"
    require(len(fold.train) >= 2 and len(fold.val) >= 1, "val_data", splitter, rule)
    both = np.intersect1d(fold.train.numpy(), fold.val.numpy())
    rule = f"a splitter that validates on other examples than it trains on; fold {number} has {len(both)} in both"
    require(not len(both), "val_data", splitter, rule)
