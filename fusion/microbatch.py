"""A batch in parts that fit memory: gradients add up to those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def split(batch: Any, parts: int) -> list[Any]:
    """A batch in at most `parts` parts of nearly equal size.

    Args:
        batch: tensors with samples first, in any nesting of tuples, lists and dicts; all else, and tensors
            without axes, goes into every part.
        parts: at least 1; fewer come back if there are fewer samples.

    Raises:
        ValueError: if `parts` is below 1, the batch has no tensor, or tensors disagree in their samples.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}, but must be >= 1")
    leaves, spec = tree_flatten(batch)
    sizes = _sizes(batch)
    if len(sizes) != 1:
        raise ValueError(f"batch has tensors of {sorted(sizes)} samples, but must have one number of samples")
    (samples,) = sizes
    pieces = [
        leaf.tensor_split(min(parts, samples)) if _has_samples(leaf) else [leaf] * min(parts, samples)
        for leaf in leaves
    ]
    return [tree_unflatten(list(piece), spec) for piece in zip(*pieces)]


def can_be_split(batch: Any) -> bool:
    """Whether all tensors of a batch have as many samples; of sequences first, graphs or boxes nobody knows whose."""
    return len(_sizes(batch)) == 1


def _sizes(batch: Any) -> set[int]:
    return {leaf.shape[0] for leaf in tree_flatten(batch)[0] if _has_samples(leaf)}


def backward(objective: Callable[[Any], Tensor], batch: Any, parts: int = 1) -> Tensor:
    """Gradients of the mean loss over a batch, added up part by part; activations are those of one part.

    Equal to the whole batch at once for losses that are means over samples which do not see each other:
    BatchNorm in training mode sees the part as its batch.

    Args:
        objective: batch -> mean loss, [] for one model or [K] for K of them.
        batch: see `split`.
        parts: how many parts to split the batch into.

    Returns:
        The loss over the whole batch, shaped as the objective's, detached.
    """
    if parts == 1:
        loss = objective(batch)
        loss.sum().backward()
        return loss.detach()
    pieces = split(batch, parts)
    total: Tensor | None = None
    samples = [_samples(piece) for piece in pieces]
    for piece, size in zip(pieces, samples):
        part = objective(piece) * (size / sum(samples))
        part.sum().backward()
        total = part.detach() if total is None else total + part.detach()
    assert total is not None
    return total


def _samples(batch: Any) -> int:
    return next(int(leaf.shape[0]) for leaf in tree_flatten(batch)[0] if _has_samples(leaf))


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0
