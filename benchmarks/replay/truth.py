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
from hydro_rasda.training.kept_weights import TOLERANCE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Keep = Literal["last", "best"]
"""The weights that are handed back: those after the last epoch, or averaged ones after the epoch that `tune` keeps."""


def goodness(
    table: Table, width: float, split: Split = "validation", *, ema: bool = False, keep: Keep = "last"
) -> Floats:
    """Learning curves [S, C, E]: higher is better, -inf where diverged.

    Args:
        ema: Whether weights are averaged.
        keep: With "best", at each epoch the score of the averaged weights that are kept up to there.
    """
    if keep == "last":
        return better_is_higher(table, table.curves(width, split, ema=ema))
    validated = goodness(table, width, ema=True)
    return np.take_along_axis(goodness(table, width, split, ema=True), _kept_so_far(validated), -1)


def after_cooldown(table: Table, width: float, epoch: int, share: float) -> Floats:
    """Validation after a cooldown, likewise: [S, C]."""
    return better_is_higher(table, table.after_cooldown(width, epoch, share))


def better_is_higher(table: Table, scores: NDArray[np.float32]) -> Floats:
    """Scores of a table: negated where less is better, -inf where training diverged."""
    values = scores.astype(np.float64)
    return np.where(np.isnan(values), -np.inf, values if table.about.mode == "max" else -values)


def _kept_so_far(curves: Floats) -> Ints:
    """For each epoch the place of the one that `tune` keeps up to there, see `hydro_rasda.training.kept_weights`."""
    first, top, kept = curves[..., 0], curves[..., 0], np.zeros(curves.shape, int)
    for epoch in range(1, curves.shape[-1]):
        score = curves[..., epoch]
        first = np.where(np.isfinite(first), first, score)
        top = np.maximum(top, score)
        with np.errstate(invalid="ignore"):  # of one that has diverged throughout
            keeps = np.isfinite(score) & (top - score <= TOLERANCE * (top - first))
        kept[..., epoch] = np.where(keeps, epoch, kept[..., epoch - 1])
    return kept


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
