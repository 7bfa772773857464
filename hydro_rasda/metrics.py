"""Means of an objective's metrics over examples: over batches, and over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

EVAL_BATCH_FACTOR = 4
"""Evaluation keeps no activations for a backward pass, so its batches are this many times larger."""


def mean_metrics(measured: Iterable[tuple[Mapping[str, Tensor], int]]) -> dict[str, Tensor]:
    """Mean over examples, in double precision, without waiting for the device at each step.

    Args:
        measured: For each batch, its mean metrics and its number of examples.
    """
    return means(summed(measured))


@dataclass
class Sums:
    """Metrics summed over examples, in double precision; `count` examples."""

    totals: dict[str, Tensor]
    count: int


def summed(measured: Iterable[tuple[Mapping[str, Tensor], int]]) -> Sums:
    """Metrics summed over batches; takes what `mean_metrics` takes."""
    sums = Sums({}, 0)
    for metrics, examples in measured:
        sums.count += examples
        for name, value in metrics.items():
            # A filler's metrics count nothing, not even where they are not finite.
            weighted = value.double() * examples if examples else torch.zeros_like(value, dtype=torch.float64)
            sums.totals[name] = sums.totals[name] + weighted if name in sums.totals else weighted
    return sums


def means(sums: Sums) -> dict[str, Tensor]:
    """What the sums come to for one example."""
    return {name: total / sums.count for name, total in sums.totals.items()}


def add_over_ranks(parts: Sequence[Sums]) -> None:
    """Replace sums over a rank's examples by those over all ranks', in one exchange."""
    device = next(iter(parts[0].totals.values())).device
    own = [torch.tensor([float(sums.count) for sums in parts], dtype=torch.float64, device=device)]
    own += [sums.totals[name] for sums in parts for name in sorted(sums.totals)]
    joined = torch.cat(own)
    dist.all_reduce(joined)
    values = iter(joined.split([len(own[0])] + [len(total) for total in own[1:]]))
    for sums, count in zip(parts, next(values).tolist()):
        sums.count = int(count)
    for sums in parts:
        for name in sorted(sums.totals):
            sums.totals[name] = next(values)
