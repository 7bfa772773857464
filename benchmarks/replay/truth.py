"""What the replay table says is true: how good each configuration is at full size, and how far seeds lie apart.

Everything here is "higher is better": scores of a task that is minimized are negated, and what diverged is -inf.
Shapes: S seeds, C configurations, E epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.table import Split, Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Keep = Literal["last", "best", "own", "better"]
"""Which weights count, as `tune` has it: "last", those after the last epoch; "best", at full width, the averaged ones
after the epoch that validated best; "own", likewise but never averaged (`tune(ema=0)`); "better", of each epoch
whichever of the two validated better, as `tune` once had it."""


def goodness(
    table: Table,
    width: float,
    split: Split = "validation",
    *,
    ema: bool = False,
    loss: bool = False,
    keep: Keep = "last",
) -> Floats:
    """Learning curves [S, C, E]: higher is better, -inf where diverged.

    With another `keep` than "last", at each epoch those of the epoch up to there whose weights validated best.
    """
    curves = after_each_epoch(table, width, split, ema=ema, loss=loss, keep=keep)
    if keep == "last":
        return curves
    validated = curves
    if split != "validation":
        validated = after_each_epoch(table, width, ema=ema, loss=loss, keep=keep)
    return np.take_along_axis(curves, _best_so_far(validated), -1)


def after_each_epoch(
    table: Table,
    width: float,
    split: Split = "validation",
    *,
    ema: bool = False,
    loss: bool = False,
    keep: Keep = "last",
) -> Floats:
    """The same of each epoch for itself, whichever is kept: at full width, of the weights that count."""

    def curves(of: Split, averaged: bool) -> Floats:
        found = table.curves(width, of, ema=averaged, loss=loss).astype(np.float64)
        return np.where(np.isnan(found), -np.inf, found if table.about.mode == "max" and not loss else -found)

    if keep == "best" and width == 1:
        return curves(split, True)
    own = curves(split, ema)
    if keep != "better" or width < 1 or ema:
        return own
    better = curves("validation", True) > curves("validation", False)
    return np.where(better, curves(split, True), own)


def _best_so_far(curves: Floats) -> Ints:
    """For each epoch the place of the best one up to there, the first where several are."""
    highest = np.maximum.accumulate(curves, -1)
    rises = np.zeros(curves.shape, bool)
    rises[..., 1:] = highest[..., 1:] > highest[..., :-1]
    return np.maximum.accumulate(np.where(rises, np.arange(curves.shape[-1]), 0), -1)


def complete_seeds(table: Table, *widths: float) -> list[int]:
    """Places of the seeds with which all configurations are recorded at all of these widths."""
    seeds = enumerate(table.about.seeds)
    return [place for place, seed in seeds if all(table.complete(width, seed) for width in widths)]


def truth(table: Table, seeds: Sequence[int], split: Split = "validation", keep: Keep = "last") -> Floats:
    """Of each configuration, the mean over seeds (places in the table) of the score in the end at full width: [C]."""
    last: Floats = goodness(table, 1.0, split, keep=keep)[list(seeds), :, -1].mean(0)
    return last


def seed_spread(table: Table, seeds: Sequence[int], split: Split = "validation", keep: Keep = "last") -> float:
    """Standard deviation between seeds of the score in the end at full width, pooled over the better quarter.

    NaN of a single seed.
    """
    if len(seeds) < 2:
        return math.nan
    good = best_first(truth(table, seeds, split, keep))[: max(4, len(table.about.configs) // 4)]
    last = goodness(table, 1.0, split, keep=keep)[list(seeds), :, -1]
    variances = last[:, good].var(0, ddof=1)
    return float(np.sqrt(variances[np.isfinite(variances)].mean()))


def best_first(scores: Floats) -> Ints:
    """Places of scores, best first; ties go by the lower place, as in `tune`."""
    return np.argsort(-scores, kind="stable")


def subsets(configs: int, share: float, count: int) -> Iterator[Ints]:
    """Random subsets of so many configurations, in random order; the same in every call."""
    generator = np.random.default_rng(0)
    size = round(share * configs)
    for _ in range(count):
        yield generator.permutation(configs)[:size]
