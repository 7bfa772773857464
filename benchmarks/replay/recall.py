"""Where the best configuration is lost: how often a narrow or short training has it among its best.

The true best is the one with the best mean, over seeds, of the last validation score at full width. A table has one
of them, so that recall is also taken over random halves of the configurations, each of which has its own. At full
width, a seed is ranked against the truth of the other seeds; where there is but one, against its own end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.policies import REDUCTION_FACTOR, TOP_K, rungs
from benchmarks.replay.table import Table
from benchmarks.replay.truth import (
    Floats,
    Ints,
    Keep,
    best_first,
    complete_seeds,
    goodness,
    seed_spread,
    subsets,
    truth,
)

KEPT = (4, 5, 8)
SHARE, RESAMPLES = 0.5, 200
SWEPT = 1 / 8


@dataclass(frozen=True)
class Recall:
    """What ranking by one width and epoch gives; means over seeds and halves of the configurations.

    Attributes:
        rho: Spearman's correlation with the truth, over all configurations.
        best: Of the true best of a half, how often it is among the first 4, 5 and 8.
        regret: By how much the best of the first 4 is behind the best of all, in standard deviations between seeds.
        rank: Of the true best of the whole table, the median place over seeds, 1 the first.
    """

    rho: float
    best: tuple[float, ...]
    regret: float
    rank: float


def epochs_of(max_t: int) -> list[int]:
    """After one epoch, a ninth, a third, two thirds and all of a training."""
    return sorted({1, *(math.ceil(max_t * share) for share in (1 / 9, 1 / 3, 2 / 3, 1))})


def recall(table: Table, width: float, epoch: int, *, ema: bool = False, keep: Keep = "last") -> Recall:
    """How well scores at a width after an epoch find what is best in the end at full width."""
    full = complete_seeds(table, 1.0)
    halves = list(subsets(len(table.about.configs), SHARE, RESAMPLES))
    curves, spread = goodness(table, width, ema=ema, keep=keep), seed_spread(table, full, keep=keep)
    rhos, ranks, found, regrets = [], [], [], []
    for seed in complete_seeds(table, width):
        judges = [s for s in full if s != seed or len(full) == 1] if width == 1 else full
        known = truth(table, judges, keep=keep)
        scores = curves[seed, :, epoch - 1]
        rhos.append(spearman(scores, known))
        ranks.append(1 + int(np.flatnonzero(best_first(scores) == best_first(known)[0])[0]))
        for half in halves:
            places, lost = _found(scores[half], known[half])
            found.append(places)
            regrets.append(lost / spread)
    return Recall(float(np.mean(rhos)), tuple(np.mean(found, 0)), float(np.mean(regrets)), float(np.median(ranks)))


def _found(scores: Floats, known: Floats) -> tuple[list[bool], float]:
    order, best = best_first(scores), best_first(known)[0]
    return [best in order[:kept] for kept in KEPT], float(known[best] - known[order[: KEPT[0]]].max())


def spearman(one: Floats, other: Floats) -> float:
    """Rank correlation; equal values, what diverged among them, share their mean rank."""
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def losses(table: Table, keep: Keep = "last") -> dict[int, float]:
    """At which epoch today's sweep drops the true best: shares of seeds and three quarters of the configurations.

    At 0 the share that stays to the end of the sweep.
    """
    about, curves = table.about, goodness(table, SWEPT, keep=keep)
    known = truth(table, complete_seeds(table, 1.0), keep=keep)
    warmup = max(float(config.get("warmup_epochs", 0)) for config in about.configs)
    stops = rungs(about.max_t, warmup)
    fallen = dict.fromkeys((0, *stops), 0.0)
    sets = list(subsets(len(about.configs), 0.75, RESAMPLES))
    runs = [(seed, left) for seed in complete_seeds(table, SWEPT) for left in sets]
    for seed, left in runs:
        fallen[_falls(curves[seed], left, left[best_first(known[left])[0]], stops)] += 1 / len(runs)
    return fallen


def _falls(curves: Floats, left: Ints, best: int, stops: Sequence[int]) -> int:
    for stop in stops:
        kept = TOP_K if stop == stops[-1] else max(TOP_K, len(left) // REDUCTION_FACTOR)
        left = left[best_first(curves[left, stop - 1])[:kept]]
        if best not in left:
            return stop
        if len(left) <= TOP_K:
            break
    return 0


def page(tables: Mapping[str, Table], keep: Keep = "last") -> str:
    """For each task a table over widths and epochs."""
    parts = []
    for name, table in tables.items():
        full = complete_seeds(table, 1.0)
        if not full:
            continue
        parts += [_title(name, table, full, keep), ""]
        parts += ["| width | epoch | rho | best in 4 | in 5 | in 8 | its place | regret of 4 | ... averaged weights: "]
        parts[-1] += "rho | in 4 | in 5 | in 8 | its place | regret of 4 |"
        parts.append("|" + "---|" * 14)
        for width in table.about.widths:
            if complete_seeds(table, width):
                parts += [_row(table, width, epoch, keep) for epoch in epochs_of(table.about.max_t)]
        parts.append("")
    return "\n".join(parts)


def _title(name: str, table: Table, full: list[int], keep: Keep) -> str:
    about, spread = table.about, seed_spread(table, full, keep=keep)
    diverged = float(np.isinf(goodness(table, 1.0)[full, :, -1]).mean())
    fallen = ", ".join(
        f"{share:.0%} {f'at epoch {stop}' if stop else 'stay'}" for stop, share in losses(table, keep=keep).items()
    )
    return (
        f"**{name}**: {len(about.configs)} configurations, {len(full)} seeds at full width, {about.max_t} epochs; "
        f"seeds' standard deviation {spread:.3g}; {diverged:.0%} diverge at full width. "
        f"In today's sweep the best falls: {fallen}."
    )


def _row(table: Table, width: float, epoch: int, keep: Keep) -> str:
    cells = [f"{width:g}", str(epoch)]
    for ema in (False, True):
        found = recall(table, width, epoch, ema=ema, keep=keep)
        cells += [f"{found.rho:.2f}", *(f"{share:.2f}" for share in found.best)]
        cells += [f"{found.rank:g}", f"{found.regret:.2f}"]
    return "| " + " | ".join(cells) + " |"
