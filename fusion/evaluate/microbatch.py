"""Micro-batches: a batch is split into parts that fit memory. Their gradients add up to the gradients of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusion.argument_checks import require
from fusion.structure.module_parts import count_samples, has_samples
from fusion.structure.objects_of_tensors import look_into

Means = Mapping[str, Tensor]
"""Means over the samples of a batch, by name: shape [] for one model, [K] for K models.

If a mean is over other items than the samples, such as targets that are not ignored, the mapping also has its weight.
This is the number of averaged items, or the sum of their weights. The key "weight" holds the weight of all means, and
"weight/loss" the weight of "loss" alone. A mean of weight 0 does not count, even if it is NaN.
"""

WEIGHT = "weight"


def is_weight(name: str) -> bool:
    """Return whether `name`, a key of `Means`, names the weight of a mean rather than a mean."""
    return name == WEIGHT or name.startswith(f"{WEIGHT}/")


def weight_of(means: Means, name: str) -> Tensor | None:
    """Return the weight with which a batch's mean `name` counts; None if the number of samples is its weight."""
    own = means.get(f"{WEIGHT}/{name}", means.get(WEIGHT))
    return None if own is None else own.detach().to(means[name].device)  # objectives often make weights on the CPU


class Sums:
    """Adds up means over batches, in double precision and without waiting for the device.

    Attributes:
        totals: Sums of each mean times its weight.
        weights: Sums of the weights.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor | float] = {}

    def add(self, means: Means, samples: int) -> None:
        """Add the means over a batch with `samples` samples. A batch with 0 samples is a filler and does not count."""
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
        """Return the means over all batches; a mean is NaN if its weight is 0."""
        return {name: total / self.weights[name] for name, total in self.totals.items()}


def split(batch: Any, parts: int) -> list[Any]:
    """Split a batch into at most `parts` parts of nearly equal size.

    Args:
        batch: Tensors whose first axis is the samples, in any nesting of tuples, lists, dicts and objects
            (`look_into`). Tensors without axes, and all other values, go into every part.
        parts: At least 1. With 1, any batch is returned as it is. If there are fewer samples than parts, each part has
            one sample.

    Raises:
        ValueError: if `parts` is below 1. Also if `parts` is above 1 and the batch has no tensors, or tensors with
            different numbers of samples.
    """
    require(parts >= 1, "parts", parts, ">= 1")
    if parts == 1:
        return [batch]
    leaves, spec = tree_flatten(look_into(batch))
    sizes = _sizes(batch)
    if len(sizes) != 1:
        raise ValueError(f"`batch` has tensors of {sorted(sizes)} samples, but must have one number of samples")
    parts = min(parts, *sizes)
    pieces = [leaf.tensor_split(parts) if has_samples(leaf) else [leaf] * parts for leaf in leaves]
    return [tree_unflatten(list(piece), spec) for piece in zip(*pieces)]


def can_be_split(batch: Any) -> bool:
    """Return whether a batch can be split by samples: its tensors with axes all have one length, the number of samples.

    Batches of graphs, boxes or sequences have several lengths. Nothing then tells which rows belong to which sample.
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
    """Compute the gradients of the mean loss over a batch, part by part, so that memory holds one part's activations.

    The gradients equal those of the whole batch if the loss is a weighted mean over independent samples. They differ
    with BatchNorm in training mode, which normalizes each part by itself.

    Args:
        objective: Maps a batch to its means. The gradients of the mean "loss" are computed.
        batch: See `split`.
        weight: Factor of a loss that is a mean over the samples. If the loss has its own weight in `Means`, and there
            are several parts or `over_ranks`, only a factor of 0 has an effect: the gradients are then 0.
        apart: Context for each part but the last, such as DDP's `no_sync`, so that ranks average gradients once.
        scaled: Scales the losses before their backward pass, such as `LossScale.apply`.
        gradients: Returns all gradients. They are rescaled in place, so they must be those of this batch alone. Needed
            if there are several parts and the loss has a weight.
        over_ranks: Averages the weight of this rank's batch over all ranks whose gradients are averaged.

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
            weighed = over_ranks is not None or len(pieces) > 1
            own, loss = weight_of(means, "loss") if weighed else None, means["loss"]
            share: Tensor | float = size / sum(sizes) * weight
            if own is not None:
                own = own.to(torch.promote_types(loss.dtype, torch.float32)) if weight else torch.zeros_like(loss)
                seen = own if seen is None else seen + own
                # The weight of the whole batch is known only at its last part. Until then, divide by `unit`, a guess.
                # At the last part, correct the gradients so far by the factor `unit / total`.
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
    """Compute the means over a batch, and their weights, part by part without gradients.

    `backward` describes the arguments.
    """
    pieces, whole = split(batch, parts), _Whole()
    with torch.no_grad():
        for piece, size in zip(pieces, _sizes_of(pieces)):
            whole.add(objective(piece), size)
    return whole.means()


class _Whole:
    """The means over a batch, computed from the means over its parts."""

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
        means = sums.means()  # means of integers and booleans stay float64
        floats = {name: mean.to(first[name].dtype) for name, mean in means.items() if first[name].is_floating_point()}
        return means | floats | weights


def _or_one(weight: Tensor) -> Tensor:
    """Return `weight`, with 1 in place of 0, so that it can be a divisor."""
    return weight.where(weight > 0, 1)


def _multiply(gradients: Iterable[Tensor | None], factor: Tensor) -> None:
    """Multiply gradients by `factor`, in place; a factor [K] multiplies stacked gradients [K, ...] by member."""
    for gradient in gradients:
        if gradient is not None:
            ones = (1,) * (gradient.ndim - 1) if factor.ndim else ()
            gradient.mul_(factor.to(gradient.dtype).view((*factor.shape, *ones)))


def _sizes_of(pieces: Sequence[Any]) -> list[int]:
    """Return the number of samples of each part; a single part counts as 1, because it may have no samples."""
    return [1] if len(pieces) == 1 else [count_samples(piece) for piece in pieces]


def _sizes(batch: Any) -> set[int]:
    return {leaf.shape[0] for leaf in tree_flatten(look_into(batch))[0] if has_samples(leaf)}
