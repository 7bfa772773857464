"""Metrics of an epoch: weighted means of an objective's metrics, and the user's metrics of whole validation sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusion.evaluate.microbatch import Sums
from hydro_rasda.common.argument_checks import is_metric
from hydro_rasda.problem.loss_weight import IGNORED
from hydro_rasda.problem.objective import OUTPUTS, TARGETS, scalars


def summed(measured: Iterable[tuple[Mapping[str, Tensor], int]]) -> Sums:
    """Sum metrics over a data set; `means()` of the result are the means over all examples.

    Args:
        measured: For each batch, its mean metrics (with their weights, if any) and its number of examples.
    """
    sums = Sums()
    for metrics, examples in measured:
        sums.add(metrics, examples)
    return sums


def add_over_ranks(sums: Sums) -> None:
    """Replace this rank's sums by the sums over all ranks, in one exchange."""
    names = sorted(sums.totals)
    of_loss = sums.totals.get("loss", next(iter(sums.totals.values())))
    totals = [sums.totals[name].to(of_loss.device) for name in names]
    weights = [torch.as_tensor(sums.weights[name]).to(total).expand_as(total) for name, total in zip(names, totals)]
    joined = torch.cat([*totals, *weights])
    dist.all_reduce(joined)
    values = iter(joined.split([len(total) for total in totals * 2]))
    for of_each in (sums.totals, sums.weights):
        of_each |= {name: next(values) for name in names}


WholeMetrics = Callable[[Tensor, Tensor], Mapping[str, Any]]
"""`metrics(outputs [N, ...], targets [N, ...]) -> {name: number}` for one model, with tensors on the CPU.

Shorter sequences are padded to the longest with -100, which cross-entropy ignores in targets.
"""


@dataclass
class Collected:
    """Outputs and targets of K models for a data set.

    Attributes:
        batches: Outputs and targets of each batch, [K, n, ...] on the CPU; None for a filler, the batch of a rank for
            which no examples are left.
    """

    batches: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)

    def take(self, metrics: Mapping[str, Tensor], examples: int) -> dict[str, Tensor]:
        """Keep the outputs and targets of a batch, and return its scalar metrics.

        Args:
            examples: Number of examples that count. If it is 0, the batch is a filler, and None is kept.
        """
        if OUTPUTS not in metrics or TARGETS not in metrics:
            told = f"an objective must return {OUTPUTS!r} and {TARGETS!r}, too, where `metrics` is given"
            raise ValueError(f"{told}; it returned {sorted(metrics)}")
        outputs, targets = (metrics[name].detach().cpu() for name in (OUTPUTS, TARGETS))
        self.batches.append((outputs, targets) if examples else None)
        return scalars(metrics)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return the outputs [K, N, ...] and the targets [K, N, ...] of all batches."""
        outputs, targets = zip(*(batch for batch in self.batches if batch is not None))
        return _joined(outputs), _joined(targets)

    def over_ranks(self, world: int) -> Collected:
        """Return the outputs and targets of all ranks, in the order of the examples.

        Each rank has a part of each batch.
        """
        if world == 1:
            return self
        each: list[list[tuple[Tensor, Tensor] | None]] = [[] for _ in range(world)]
        dist.all_gather_object(each, self.batches)
        return Collected([_interleaved([part for part in parts if part is not None]) for parts in zip(*each)])


def of_members(
    metrics: WholeMetrics, collected: Collected, losses: Sequence[float], names: Iterable[str]
) -> dict[str, list[float]]:
    """Return the metrics of a whole data set: name -> values of the K members.

    Args:
        losses: The mean loss of each member. If a member's loss is not finite, its metrics are NaN.
    """
    outputs_K, targets_K = collected.whole()
    found: dict[str, list[float]] = {name: [] for name in names}
    for loss, outputs, targets in zip(losses, outputs_K, targets_K, strict=True):
        values = measured(metrics, outputs, targets) if math.isfinite(loss) else dict.fromkeys(found, math.nan)
        if values.keys() != found.keys():
            raise ValueError(f"`metrics` returned {sorted(values)}, but must return {sorted(found)}, as it did before")
        for name, value in values.items():
            found[name].append(value)
    return found


def measured(metrics: WholeMetrics, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the values of the user's function `metrics` for the outputs and targets of one model, as floats.

    Raises:
        ValueError: If the function does not return a dict of numbers by name.
    """
    values = metrics(outputs, targets)
    plain = {n: v.item() if hasattr(v, "item") else v for n, v in values.items()} if isinstance(values, Mapping) else {}
    if not plain or not all(isinstance(name, str) and is_metric(value) for name, value in plain.items()):
        raise ValueError(f"`metrics` returned {values!r}, but must return a dict of numbers by name")
    return {name: float(value) for name, value in plain.items()}


def _joined(batches: Sequence[Tensor]) -> Tensor:
    """Join batches along the samples; pad shorter sequences with `IGNORED`."""
    sizes = {batch.shape[2:] for batch in batches}
    if len(sizes) > 1 and len({len(size) for size in sizes}) == 1:
        longest = [max(of_axis) for of_axis in zip(*sizes)]
        batches = [_filled(batch, longest) for batch in batches]
    try:
        return torch.cat(list(batches), 1)
    except RuntimeError as error:
        raise ValueError(f"`metrics` is given all batches at once, but these cannot be joined: {error}") from error


def _filled(batch: Tensor, sizes: Sequence[int]) -> Tensor:
    whole = batch.new_full((*batch.shape[:2], *sizes), IGNORED)
    whole[tuple(map(slice, batch.shape))] = batch
    return whole


def _interleaved(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join the parts of a batch from R ranks, where rank r has the examples r, r + R, r + 2R, ..."""
    outputs, targets = zip(*parts)
    return _in_turn(outputs), _in_turn(targets)


def _in_turn(parts: Sequence[Tensor]) -> Tensor:
    whole = torch.cat(list(parts), 1)
    for i, part in enumerate(parts):
        whole[:, i :: len(parts)] = part
    return whole
