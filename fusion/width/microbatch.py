"""A batch in parts that fit memory: gradients add up to those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusion.checks import require
from fusion.tensors import count_samples, has_samples

Means = Mapping[str, Tensor]
"""Means over the samples of a batch by name: [] for one model, or [K] for K of them.

A mean that is not over the samples has its weight beside it: the number, or the summed weights, of all that it is over,
such as the targets that are not ignored. "weight" is that of all means, "weight/loss" that of one alone. A mean of
weight 0 counts nowhere, not even where it is NaN.
"""

WEIGHT = "weight"


def is_weight(name: str) -> bool:
    """Whether a name among means is that of a weight."""
    return name == WEIGHT or name.startswith(f"{WEIGHT}/")


def weight_of(means: Means, name: str) -> Tensor | None:
    """The weight of a mean; None where that is the number of samples."""
    own = means.get(f"{WEIGHT}/{name}", means.get(WEIGHT))
    return None if own is None else own.detach()


class Sums:
    """Means added up over batches, in double precision, without waiting for the device.

    Attributes:
        totals: By name, means times their weights.
        weights: By name, the weights.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor | float] = {}

    def add(self, means: Means, samples: int) -> None:
        """Take in the means over a batch of so many samples; of none, it is a filler, and counts nothing."""
        for name, mean in means.items():
            if is_weight(name):
                continue
            own, mean = weight_of(means, name), mean.detach().double()
            weight: Tensor | float = float(samples)
            if samples and own is not None:
                weight = own.double()
                total = torch.where(weight > 0, mean * weight, 0.0)
            else:
                total = mean * samples if samples else torch.zeros_like(mean)
            self.totals[name] = self.totals[name] + total if name in self.totals else total
            self.weights[name] = self.weights.get(name, 0.0) + weight

    def means(self) -> dict[str, Tensor]:
        """The means over all batches; NaN where there was nothing to average."""
        return {name: total / self.weights[name] for name, total in self.totals.items()}


def split(batch: Any, parts: int) -> list[Any]:
    """A batch in at most `parts` parts of nearly equal size.

    Args:
        batch: Tensors with samples first, in any nesting of tuples, lists and dicts; all else, and tensors
            without axes, goes into every part.
        parts: At least 1, which takes any batch as it is; fewer come back if there are fewer samples.

    Raises:
        ValueError: where `parts` is below 1, or above it for a batch without tensors, or with tensors that disagree in
            their samples.
    """
    require(parts >= 1, "parts", parts, ">= 1")
    if parts == 1:
        return [batch]
    leaves, spec = tree_flatten(batch)
    sizes = _sizes(batch)
    if len(sizes) != 1:
        raise ValueError(f"`batch` has tensors of {sorted(sizes)} samples, but must have one number of samples")
    parts = min(parts, *sizes)
    pieces = [leaf.tensor_split(parts) if has_samples(leaf) else [leaf] * parts for leaf in leaves]
    return [tree_unflatten(list(piece), spec) for piece in zip(*pieces)]


def can_be_split(batch: Any) -> bool:
    """Whether all tensors of a batch have one length, which is taken for its number of samples.

    Those of graphs, boxes or sequences have several: nobody can tell which rows belong to which sample.
    """
    return len(_sizes(batch)) == 1


def backward(
    objective: Callable[[Any], Means],
    batch: Any,
    parts: int = 1,
    weight: float = 1.0,
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scaled: Callable[[Tensor], Tensor] | None = None,
    gradients: Callable[[], Iterable[Tensor | None]] | None = None,
    over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Gradients of the mean loss over a batch, added up part by part; activations are those of one part.

    Equal to the whole batch at once for losses that are means, by their weights, over samples which do not see each
    other: BatchNorm in training mode sees the part as its batch.

    Args:
        objective: batch -> means; the gradients are those of "loss".
        batch: See `split`.
        parts: How many parts to split the batch into.
        weight: What the loss is multiplied by besides, where it is a mean over the samples.
        apart: Entered for each part but the last, such as DDP's `no_sync`: gradients are averaged once.
        scaled: What is done to the losses before, such as `LossScale.apply`.
        gradients: Gives all gradients so far. Needed for more than one part where a loss has a weight.
        over_ranks: Of the weight of this rank's batch, the mean over all ranks whose gradients are averaged.

    Returns:
        The means over the whole batch, detached, and their weights.
    """
    pieces = split(batch, parts)
    sizes = _sizes_of(pieces)
    whole, seen, unit = _Whole(), None, None
    for i, (piece, size) in enumerate(zip(pieces, sizes), 1):
        last = i == len(pieces)
        with nullcontext() if last else apart():
            means = objective(piece)
            own, loss = weight_of(means, "loss"), means["loss"]
            share: Tensor | float = size / sum(sizes) * weight
            if own is not None and (over_ranks is not None or len(pieces) > 1):
                own = own.to(torch.promote_types(loss.dtype, torch.float32)) if weight else torch.zeros_like(loss)
                seen = own if seen is None else seen + own
                # How much the batch weighs, only its last part tells.
                unit = _or_one(own * len(pieces)) if unit is None else unit
                total = unit if not last else _or_one(seen if over_ranks is None else over_ranks(seen))
                if last and i > 1:
                    assert gradients is not None
                    _multiply(gradients(), unit / total)
                share = own / total
            loss = loss if isinstance(share, float) and share == 1 else loss * share
            (loss if scaled is None else scaled(loss)).sum().backward()
        whole.add(means, size)
    return whole.means()


def evaluate(objective: Callable[[Any], Means], batch: Any, parts: int = 1) -> dict[str, Tensor]:
    """The means over a batch, part by part, without gradients, and their weights. Arguments as of `backward`."""
    pieces, whole = split(batch, parts), _Whole()
    with torch.no_grad():
        for piece, size in zip(pieces, _sizes_of(pieces)):
            whole.add(objective(piece), size)
    return whole.means()


class _Whole:
    """The means over a batch, of those over its parts."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Tensor]] = []
        self.sizes: list[int] = []

    def add(self, means: Means, size: int) -> None:
        self.parts.append({name: mean.detach() for name, mean in means.items()})
        self.sizes.append(size)

    def means(self) -> dict[str, Tensor]:
        first, *more = self.parts
        if not more:
            return first
        sums = Sums()
        for means, size in zip(self.parts, self.sizes):
            sums.add(means, size)
        weights = {name: sum((part[name] for part in more), first[name]) for name in first if is_weight(name)}
        return {name: mean.to(first[name].dtype) for name, mean in sums.means().items()} | weights


def _or_one(weight: Tensor) -> Tensor:
    """To divide by: 1 where nothing counts."""
    return weight.where(weight > 0, 1)


def _multiply(gradients: Iterable[Tensor | None], factor: Tensor) -> None:
    """Multiply gradients by a factor, or those of K members, [K, ...] each, by one for each of them."""
    for gradient in gradients:
        if gradient is not None:
            ones = (1,) * (gradient.ndim - 1) if factor.ndim else ()
            gradient.mul_(factor.to(gradient.dtype).view((*factor.shape, *ones)))


def _sizes_of(pieces: Sequence[Any]) -> list[int]:
    """Samples of each part; a batch in one need not have any."""
    return [1] if len(pieces) == 1 else [count_samples(piece) for piece in pieces]


def _sizes(batch: Any) -> set[int]:
    return {leaf.shape[0] for leaf in tree_flatten(batch)[0] if has_samples(leaf)}
