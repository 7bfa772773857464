"""A batch, the parts of it that several ranks take, and data that are ready to be read in batches."""

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
        examples: Number of rows that count: 0 for a filler, if nothing is left for the rank.
        weight: Factor of the mean loss over the rows, so that the ranks' average is the mean over the batch.
    """

    rows: slice
    examples: int
    weight: float


@dataclass(frozen=True)
class Shard:
    """A rank's place among the `world` ranks that train one model together; by default it is alone."""

    rank: int = 0
    world: int = 1

    def part(self, examples: int, least: int = 1) -> Part:
        """This rank's part of a global batch.

        If there is too little for all, the first ranks take it, and the others a filler of the same examples.

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

EVAL_BATCH_FACTOR = 4
"""Evaluation keeps no activations for a backward pass, so its batches are this many times larger."""


Batch = Any
"""A tensor, or any nesting of tuples, lists, dicts and objects of tensors, such as a dataclass; for supervised learning
`(inputs, target)`."""


Data = Sequence[Tensor] | Dataset[Any] | Callable[[int], Iterable[Batch]]
"""The data of `tune`: tensors, a map-style dataset, or a function of the batch size that makes a loader."""


class Share(NamedTuple):
    """One rank's part of a global batch, loaded; `examples` and `weight` as in `Part`."""

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
        1 and the batch has more: BatchNorm would refuse it. If too few examples are left, the last ranks get fillers.

        Args:
            batch_size: Examples of a batch, over all ranks.
            epoch: Number of the shuffled epoch, to train on; None for all examples once, for evaluation.
        """
        ...

    def last(self, batch_size: int) -> Iterator[Batch]:
        """The last batch of `in_order`, where it can be read without those before."""
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


class OwnData:
    """The place of `Batches` where only the user's own training loop reads data, in a form of its own."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ValueError("`train_data` and `val_data` are read by `train` alone")

    epoch = in_order = shares = last = _refuse

    def steps(self, batch_size: int) -> None:
        """Return None: it is not known."""

    def on(self, device: torch.device) -> OwnData:
        return self

    def describe(self) -> str:
        return "read by `train`"


def batch_length(batch: Batch) -> int:
    """Number of examples in a batch: the first dimension of its first tensor."""
    leaves = tree_leaves(look_into(batch))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    told = f"a batch is {type(batch).__name__} without a tensor of one or more dimensions"
    if len(leaves) == 1 and leaves[0] is batch and not isinstance(batch, Tensor):
        told += " in its fields; give a tuple or a dict of tensors, from which `objective` makes what the model takes"
    raise ValueError(told)


def move(batch: Batch, device: torch.device, *, wait: bool = False, always: bool = False) -> Batch:
    """A batch, or any nesting of tensors, with all of them on a device.

    Args:
        wait: True to return when the copies are done, so that copies on the CPU can be read at once.
        always: True to copy also tensors that are on the device already.
    """

    def moved(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=not wait, copy=always) if isinstance(leaf, Tensor) else leaf

    return tree_map(moved, look_into(batch))


def fresh(batch: Batch) -> Batch:
    """The same tensors in containers of their own: code may take something out of its batch, which is used again."""
    return tree_map(lambda leaf: leaf, batch)


def cut_off(batch: Batch) -> Batch:
    """Cut a batch's tensors off the graph that computed them; those that need a gradient still do.

    Features of another model may come with its graph, through which only the first step could go back.
    """

    def cut(leaf: Any) -> Any:
        return leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.grad_fn is not None else leaf

    return tree_map(cut, look_into(batch))


def outline(value: Any) -> str:
    """Shapes and types of the tensors in a value: "[(64, 3) float32, (64,) int64]"."""
    leaves = [
        f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in tree_leaves(value) if isinstance(v, Tensor)
    ]
    return f"[{', '.join(leaves)}]"
