"""Count how often the baseline is as good as itself with another seed, as any method would be by chance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from benchmarks.vs_asha.statistics import BASELINE, Cell, compared, compared_again, split_of


class Yardstick(NamedTuple):
    """How often the baseline is as good as itself with another seed, and so with another sample, weights and orders.

    The shares are those of ordered pairs of seeds with the same split of examples.

    Attributes:
        reached: Share of pairs in which the first reaches the second's final validation score.
        not_worse: Share of pairs in which the first's test score is worse by no more than the seed spread.
        again_not_worse: The same for both configurations, trained again; NaN if they were not trained again.
    """

    reached: float
    not_worse: float
    again_not_worse: float


def yardsticks(tasks: Mapping[str, Mapping[str, Sequence[Cell]]]) -> dict[str, Yardstick]:
    """Return the yardstick of each task that has pairs of the baseline's cells with the same split; all are counted."""
    found = {}
    for task, methods in tasks.items():
        both = itertools.permutations(methods[BASELINE], 2)
        if pairs := [(cell, base) for cell, base in both if split_of(cell) == split_of(base)]:
            gains, times = compared(pairs, methods)
            again = [gain >= -1 for gain in compared_again(pairs, methods)]
            shares = sum(times) / len(pairs), sum(gain >= -1 for gain in gains) / len(pairs)
            found[task] = Yardstick(*shares, fmean(again) if again else math.nan)
    return found


class ByChance(NamedTuple):
    """Average counts for some runs if each were the baseline with another seed; see `Yardstick`."""

    runs: int
    reached: float
    not_worse: float
    again: int
    again_not_worse: float


def by_chance(tasks: Mapping[str, Mapping[str, Sequence[Cell]]], method: str) -> ByChance:
    """Return the counts for as many runs on each task as a method has. Tasks without a yardstick are left out."""
    found = yardsticks(tasks)
    runs = {task: len(tasks[task][method]) for task in found}
    again = {task: one.again_not_worse for task, one in found.items() if not math.isnan(one.again_not_worse)}
    return ByChance(
        runs=sum(runs.values()),
        reached=sum(runs[task] * one.reached for task, one in found.items()),
        not_worse=sum(runs[task] * one.not_worse for task, one in found.items()),
        again=sum(runs[task] for task in again),
        again_not_worse=sum(runs[task] * share for task, share in again.items()),
    )
