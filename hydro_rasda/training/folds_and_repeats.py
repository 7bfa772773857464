"""Train several models of a trial, one for each fold or seed. A trial's scores are means over its models.

Shapes: R models of a trial, T trials of a group. In a fused group, a trial's models lie side by side: K = T * R.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fusion.evaluate.microbatch import Sums
from hydro_rasda.contracts import EpochMetrics
from hydro_rasda.data import Batch, Shard, Share
from hydro_rasda.problem.problem import Problem
from hydro_rasda.settings.config import TuneConfig, unaveraged


def shares_of(each: Sequence[Problem], batch_size: int, epoch: int, shard: Shard) -> Iterator[Share]:
    """Return a rank's training batches of an epoch. `each` has the problem of each of a trial's models.

    With several models, a batch is the list of their batches.
    """
    found = [problem.train_data.shares(batch_size, epoch, shard) for problem in each]
    if len(found) == 1:
        return found[0]
    return (Share([share.batch for share in of], of[0].examples, 1.0) for of in zip(*found, strict=True))


def stacked(batches: Sequence[Batch], copies: int) -> Batch | None:
    """Put the batches of R models side by side and repeat them `copies` times: K = copies * R.

    Returns:
        A batch of tensors [N, K, ...]. Samples come first, so that the batch can be split. None if the batches differ
        in structure, shapes, dtypes or values that are not tensors.
    """
    flat = [tree_flatten(batch) for batch in batches]
    leaves, spec = flat[0]
    if any(other != spec for _, other in flat[1:]):
        return None
    found: list[Any] = []
    for own in zip(*(leaves for leaves, _ in flat), strict=True):
        if all(isinstance(leaf, Tensor) for leaf in own):
            if not own[0].ndim or any(leaf.shape != own[0].shape or leaf.dtype != own[0].dtype for leaf in own):
                return None
            found.append(torch.stack([*own] * copies, 1))
        elif all(leaf == own[0] for leaf in own[1:]):
            found.append(own[0])
        else:
            return None
    assert len(found) == len(leaves)
    return tree_unflatten(found, spec)


def members_first(batch: Batch) -> Batch:
    """Turn a batch's tensors [N, K, ...] into views [K, N, ...], whose first dimension is that of the members."""
    return tree_map(lambda leaf: leaf.movedim(1, 0) if isinstance(leaf, Tensor) else leaf, batch)


def named(part: str, sums: Sums) -> EpochMetrics:
    """Return the mean of each metric, with `part` ("train" or "val") as a prefix of its name."""
    return {f"{part}_{name}": mean.tolist() for name, mean in sums.means().items()}


def over_models(values: EpochMetrics, models: int, settings: TuneConfig) -> EpochMetrics:
    """Return each trial's mean metrics over its models, and the standard deviation of the tuned metric.

    >>> over_models({"val_loss": [1.0, 3.0, 5.0, 5.0]}, 2, TuneConfig())
    {'val_loss': [2.0, 5.0], 'val_loss_std': [1.41..., 0.0]}
    """
    if models == 1:
        return values

    def each(of_models: Sequence[float], summary: Any) -> list[float]:
        trials = [of_models[i : i + models] for i in range(0, len(of_models), models)]
        return [summary(own) if all(map(math.isfinite, own)) else math.nan for own in trials]

    means = {name: each(of_models, fmean) for name, of_models in values.items()}
    metric, spread = settings.metric, settings.spread
    for of, deviation in ((metric, spread), (unaveraged(metric), unaveraged(spread))):
        if of in values:
            means.setdefault(deviation, each(values[of], stdev))
    return means
