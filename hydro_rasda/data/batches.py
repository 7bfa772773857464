"""Batches, the parts of a batch that several ranks take, and the interface of data that are read in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from fusion.structure.objects_of_tensors import look_into


class Part(NamedTuple):
    """The part of a global batch that one rank takes.

    Attributes:
        examples: Number of rows that count. It is 0 if no example is left for the rank: the rows are then a filler,
            which does not count.
        weight: Factor of the rows' mean loss. With it, the average over the ranks is the mean loss of the global batch.
    """

    rows: slice
    examples: int
    weight: float


@dataclass(frozen=True)
class Shard:
    """The number of a rank among the `world` ranks that train one model together; by default, the only rank."""

    rank: int = 0
    world: int = 1

    def part(self, examples: int, least: int = 1) -> Part:
        """Return this rank's part of a global batch.

        If there are too few examples for all ranks, the first ranks take all of them. The other ranks get a filler:
        examples that do not count.

        Args:
            examples: Size of the global batch, >= 1.
            least: If the batch has this number of examples, a rank gets at least as many, or none. BatchNorm needs 2.

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

EVAL_BATCH_FACTOR = 4
"""Batches in evaluation are larger by this factor, because no activations are kept for a backward pass."""


Batch = Any
"""A tensor, or any nesting of tensors in tuples, lists, dicts and objects such as dataclasses.

For supervised learning, a batch is `(inputs, target)`.
"""


Data = Sequence[Tensor] | Dataset[Any] | Callable[[int], Iterable[Batch]]
"""The data of `tune`: tensors, a map-style dataset, or a function of the batch size that makes a loader."""


class Share(NamedTuple):
    """The loaded examples of one rank's part of a global batch; `examples` and `weight` are those of `Part`."""

    batch: Batch
    examples: int
    weight: float


class Batches(Protocol):
    """Data, ready to be read epoch by epoch.

    The object can be pickled. A copy from a pickle holds tensors in CPU memory until `on` moves them.
    """

    def epoch(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        """Yield the batches of one shuffled epoch, on the device."""
        ...

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """Yield batches with each example once, always in the same order, for evaluation."""
        ...

    def shares(self, batch_size: int, epoch: int | None, shard: Shard) -> Iterator[Share]:
        """Yield one rank's part of each batch that a single process would read.

        All ranks get the same number of shares. In training, no rank gets a single example, because BatchNorm would
        refuse it. The exceptions are a `batch_size` of 1, and a batch with only one example. If there are too few
        examples for all ranks, the last ranks get fillers.

        Args:
            batch_size: Examples of a batch, over all ranks.
            epoch: Number of the shuffled epoch for training; None for each example once, for evaluation.
        """
        ...

    def last(self, batch_size: int) -> Iterator[Batch]:
        """Yield the last batch of `in_order`; nothing if it cannot be read without the batches before it."""
        ...

    def steps(self, batch_size: int) -> int | None:
        """Return the number of batches per epoch; None if it is unknown until an epoch is read."""
        ...

    def on(self, device: torch.device) -> Batches:
        """Return a copy whose batches are on another device."""
        ...

    def describe(self) -> str:
        """Return one line that is equal for data of equal form; a run keeps it to recognize its data."""
        ...


class OwnData:
    """Placeholder for `Batches` if only the user's own training loop reads the data."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ValueError("`train_data` and `val_data` are read by `train` alone")

    epoch = in_order = shares = last = _refuse

    def steps(self, batch_size: int) -> None:
        """Return None, because the number of steps is unknown."""

    def on(self, device: torch.device) -> OwnData:
        return self

    def describe(self) -> str:
        return "read by `train`"


def batch_length(batch: Batch) -> int:
    """Return the number of examples in a batch: the first dimension of its first tensor that has dimensions."""
    leaves = tree_leaves(look_into(batch))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    told = f"a batch is {type(batch).__name__} without a tensor of one or more dimensions"
    if len(leaves) == 1 and leaves[0] is batch and not isinstance(batch, Tensor):
        told += " in its fields; give a tuple or a dict of tensors, from which `objective` makes what the model takes"
    raise ValueError(told)


def move(batch: Batch, device: torch.device, *, wait: bool = False, always: bool = False) -> Batch:
    """Move all tensors of a batch, or of any nesting, to a device.

    Args:
        wait: True to return only when the copies are done, so that copies on the CPU can be read at once.
        always: True to also copy tensors that are on the device already.
    """

    def moved(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=not wait, copy=always) if isinstance(leaf, Tensor) else leaf

    return tree_map(moved, look_into(batch))


def fresh(batch: Batch) -> Batch:
    """Return the same tensors in new containers, because user code may remove entries of a batch that is used again."""
    return tree_map(lambda leaf: leaf, batch)


def cut_off(batch: Batch) -> Batch:
    """Detach a batch's tensors from the autograd graph that computed them. Tensors that needed gradients still do.

    Features that another model has computed may still hold the graph of that computation. A graph can be backpropagated
    only once, so the second training step would fail.
    """

    def cut(leaf: Any) -> Any:
        return leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.grad_fn is not None else leaf

    return tree_map(cut, look_into(batch))


def outline(value: Any) -> str:
    """Return shapes and types of the tensors in a value, for messages: "[(64, 3) float32, (64,) int64]"."""
    leaves = [
        f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in tree_leaves(value) if isinstance(v, Tensor)
    ]
    return f"[{', '.join(leaves)}]"
