"""Sweeps by shares: of the configurations, how many are tried, and how many go on after which part of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replay.policies import Policy, Search, best_of, race, to_the_end


@dataclass(frozen=True)
class Rule:
    """A sweep by shares, and what follows it: how many are tried, at which width, dropped when, finished how.

    Attributes:
        width: Of the sweep's models.
        tried: Share of the configurations.
        rungs: After which share of a training, and which share of those still there goes on; the last one ranks.
        finalists: How many train at full size.
        raced: Whether they are halved there as today, or all train to the end.
        ema: Whether the sweep ranks by averaged weights.
    """

    width: float
    tried: float
    rungs: tuple[tuple[float, float], ...]
    finalists: int
    raced: bool = False
    ema: bool = False

    @property
    def name(self) -> str:
        """What it does, in short."""
        rungs = [f"{kept:.0%} go on at {share:.2f} T" for share, kept in self.rungs[:-1]]
        ranked = f"ranked at {self.rungs[-1][0]:.2g} T{' by averages' if self.ema else ''}"
        tail = f"{self.finalists} raced" if self.raced else f"{self.finalists} to the end"
        return ", ".join([f"{self.tried:.3g} of all at width {self.width:g}", *rungs, ranked, tail])

    def __call__(self, search: Search) -> int:
        """The winner's number."""
        tried = list(search.numbers)[: max(1, round(self.tried * len(search.numbers)))]
        ranked = swept_by(search, self.width, tried, self.rungs, keep=self.finalists, ema=self.ema)
        finalists = list(ranked)[: self.finalists]
        return race(search, finalists) if self.raced else to_the_end(search, finalists)


def telescoped(count: int, kept: int = 8) -> Policy:
    """Two thirds to the end at 1/8 of the width, the best of them at 1/4, the best so many of these at full size."""
    narrow = ((1 / 3, 2 / 3), (1.0, 1.0))

    def policy(search: Search) -> int:
        first = list(swept_by(search, 1 / 8, search.numbers, narrow))[:kept]
        return to_the_end(search, best_of({n: search.look(1 / 4, n, search.max_t) for n in first}, count))

    return policy


def swept_by(
    search: Search,
    width: float,
    numbers: Sequence[int],
    rungs: Sequence[tuple[float, float]],
    *,
    keep: int = 1,
    ema: bool = False,
) -> dict[int, float]:
    """A sweep by shares, see `Rule`: those that the last rung keeps, best first, with their scores there."""
    left, scores = list(numbers), dict[int, float]()
    for share, kept in rungs:
        scores = {n: search.look(width, n, math.ceil(share * search.max_t), ema=ema) for n in left}
        left = best_of(scores, max(keep, math.ceil(kept * len(left))))
    return {n: scores[n] for n in left}
