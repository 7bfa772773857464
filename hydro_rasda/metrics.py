"""Means of an objective's metrics by their weights: over batches, and over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from fusion.width.microbatch import Sums

EVAL_BATCH_FACTOR = 4
"""Evaluation keeps no activations for a backward pass, so its batches are this many times larger."""


def mean_metrics(measured: Iterable[tuple[Mapping[str, Tensor], int]]) -> dict[str, Tensor]:
    """Mean over a data set, in double precision, without waiting for the device at each step.

    Args:
        measured: For each batch, its mean metrics, with their weights where they have any, and its number of examples.
    """
    return summed(measured).means()


def summed(measured: Iterable[tuple[Mapping[str, Tensor], int]]) -> Sums:
    """Metrics summed over batches; takes what `mean_metrics` takes."""
    sums = Sums()
    for metrics, examples in measured:
        sums.add(metrics, examples)
    return sums


def add_over_ranks(sums: Sums) -> None:
    """Replace sums over a rank's examples by those over all ranks', in one exchange."""
    names = sorted(sums.totals)
    totals = [sums.totals[name] for name in names]
    weights = [torch.as_tensor(sums.weights[name]).to(total).expand_as(total) for name, total in zip(names, totals)]
    joined = torch.cat([*totals, *weights])
    dist.all_reduce(joined)
    values = iter(joined.split([len(total) for total in totals * 2]))
    for of_each in (sums.totals, sums.weights):
        of_each |= {name: next(values) for name in names}
