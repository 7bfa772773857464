"""A batch in parts that fit memory: gradients add up to those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusion.checks import require

Means = Mapping[str, Tensor]
"""Means over the samples of a batch by name: [] for one model, or [K] for K of them."""


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
    (samples,) = sizes
    pieces = [
        leaf.tensor_split(min(parts, samples)) if _has_samples(leaf) else [leaf] * min(parts, samples)
        for leaf in leaves
    ]
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
) -> dict[str, Tensor]:
    """Gradients of the mean loss over a batch, added up part by part; activations are those of one part.

    Equal to the whole batch at once for losses that are means over samples which do not see each other:
    BatchNorm in training mode sees the part as its batch.

    Args:
        objective: batch -> means over its samples; the gradients are those of "loss".
        batch: See `split`.
        parts: How many parts to split the batch into.
        weight: What the loss is multiplied by besides.
        apart: Entered for each part but the last, such as DDP's `no_sync`: gradients are averaged once.
        scaled: What is done to the losses before, such as `LossScale.apply`.

    Returns:
        The means over the whole batch, detached.
    """

    def learn(part: Any, share: float, last: bool) -> Means:
        with nullcontext() if last else apart():
            means = objective(part)
            loss = means["loss"] if share * weight == 1 else means["loss"] * (share * weight)
            (loss if scaled is None else scaled(loss)).sum().backward()
        return means

    return _over_parts(learn, batch, parts)


def evaluate(objective: Callable[[Any], Means], batch: Any, parts: int = 1) -> dict[str, Tensor]:
    """The means over a batch, part by part, without gradients. Arguments as of `backward`."""
    with torch.no_grad():
        return _over_parts(lambda part, share, last: objective(part), batch, parts)


def _over_parts(measure: Callable[[Any, float, bool], Means], batch: Any, parts: int) -> dict[str, Tensor]:
    """The average of what `measure(part, its share of the samples, whether it is the last)` returns."""
    pieces = split(batch, parts)
    if len(pieces) == 1:
        return {name: mean.detach() for name, mean in measure(pieces[0], 1.0, True).items()}
    whole: dict[str, Tensor] = {}
    sizes = [_samples(piece) for piece in pieces]
    for i, (piece, size) in enumerate(zip(pieces, sizes), 1):
        share = size / sum(sizes)
        for name, mean in measure(piece, share, i == len(pieces)).items():
            own = mean.detach() * share
            whole[name] = whole[name] + own if name in whole else own
    return whole


def _sizes(batch: Any) -> set[int]:
    return {leaf.shape[0] for leaf in tree_flatten(batch)[0] if _has_samples(leaf)}


def _samples(batch: Any) -> int:
    (samples,) = _sizes(batch)
    return samples


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0
