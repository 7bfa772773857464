"""A check of the winner: does it overfit at full size far beyond the surrogate by which it was chosen?"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from hydro_rasda.results.summary import best_of
from hydro_rasda.run.state import Run, Stage

LOST = 0.25
"""Validation must have lost this share of the final gap between training and validation since its best epoch. Measured
on the six best recorded trainings of each task (`benchmarks/replay`) with a `WIDE` gap. Those of breast cancer lose .44
to .86 of it, and those of diabetes .10 to .69. Those of the other ten tasks lose at most .10."""

WIDE = 0.25
"""Training must end this far below validation, as a share of validation's gain in training: less may be noise."""

BEYOND = 2.0
"""The gap at full size must be this many times the surrogate's gap."""


class Losses(NamedTuple):
    """The mean losses of an epoch: of its training batches, and of the validation set after it."""

    train: float
    val: float

    @property
    def gap(self) -> float:
        """The distance by which training lies below validation."""
        return self.val - self.train


def overfits_beyond(full: Sequence[Losses], narrow: Sequence[Losses]) -> bool:
    """Tell whether a full-size training overfits, and its surrogate's did not, or far less.

    Three things must hold where the training ends. Its training loss lies below the validation loss by `WIDE` of all
    that validation gained. Validation has lost `LOST` of that gap since its best epoch: a gap alone harms nobody. And
    the gap is `BEYOND` times the surrogate's, at the end of the sweep. All are ratios of differences: neither the unit
    nor the zero of a loss matters.

    Args:
        full: The losses of each epoch at full size, in order.
        narrow: The losses of each epoch of the surrogate, in order. Without any, nothing can be compared.

    >>> full = [Losses(0.9, 0.8), Losses(0.5, 0.6), Losses(0.3, 0.7), Losses(0.1, 0.8)]
    >>> overfits_beyond(full, [Losses(0.9, 0.9), Losses(0.7, 0.75)]), overfits_beyond(full, [Losses(0.2, 0.6)])
    (True, False)
    >>> overfits_beyond([Losses(0.9, 0.8), Losses(0.3, 0.4), Losses(0.0, 0.41)], [Losses(0.5, 0.5)])
    False
    """
    if len(full) < 2 or not narrow or not all(map(math.isfinite, (*full[-1], *narrow[-1]))):
        return False
    known = [losses.val for losses in full if math.isfinite(losses.val)]
    best, gap = min(known), full[-1].gap
    wide = gap > 0 and gap >= WIDE * (known[0] - best)
    return wide and full[-1].val - best >= LOST * gap and gap >= BEYOND * narrow[-1].gap


def overfitting_line(run: Run, finalists: Collection[int]) -> list[str]:
    """Warn of a winner that overfits beyond its surrogate; return no line of others, nor of a sweep at full width."""
    if run.settings.sweep.surrogate == 1 or not finalists:
        return []
    winner, _ = best_of(run, [*finalists])
    full, narrow = (_losses(run, stage, winner) for stage in ("target", "surrogate"))
    if not overfits_beyond(list(full.values()), list(narrow.values())):
        return []
    epoch = min(full, key=lambda at: full[at].val)
    end = full[max(full)]
    told = f"trial {winner} overfits at full size, which its surrogate of {max(narrow)} epochs did not show: val_loss "
    told += f"rises from {full[epoch].val:.3g} after epoch {epoch} to {end.val:.3g}, and train_loss ends at "
    early = "" if run.settings.race.patience else ", or end such trainings early (`race.patience`)"
    return [f"{told}{end.train:.3g}. Sweep the model itself (`sweep.surrogate=1`){early}"]


def _losses(run: Run, stage: Stage, number: int) -> dict[int, Losses]:
    """Return the losses by epoch; none if a training function of the user's reports no such losses."""
    lines = run.metrics.get((stage, number), ())
    pairs: dict[int, list[Any]] = {
        line["epoch"]: [line[name] for name in ("train_loss", "val_loss") if name in line] for line in lines
    }
    return {epoch: Losses(*map(_number, pair)) for epoch, pair in pairs.items() if len(pair) == 2}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
