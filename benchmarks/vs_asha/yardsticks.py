"""How often the baseline is as good as itself with another seed: what any method would come to by chance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from benchmarks.vs_asha.statistics import BASELINE, Cell, compared, compared_again, split_of


class Yardstick(NamedTuple):
    """How often the baseline is as good as itself with another seed: another sample, other weights and orders.

    Attributes:
        reached: Share of ordered pairs of seeds with the same split of examples, of which the first comes to the
            second's final validation score.
        not_worse: Share of those in which its test score is worse by no more than the seed spread.
        again_not_worse: The same of both configurations, trained again; NaN where they were not.
    """

    reached: float
    not_worse: float
    again_not_worse: float


def yardsticks(tasks: Mapping[str, Mapping[str, Sequence[Cell]]]) -> dict[str, Yardstick]:
    """By task, from all ordered pairs of the baseline's cells of one split; tasks without any are left out."""
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
    """What some runs would come to, on average, were each the baseline with another seed; see `Yardstick`."""

    runs: int
    reached: float
    not_worse: float
    again: int
    again_not_worse: float


def by_chance(tasks: Mapping[str, Mapping[str, Sequence[Cell]]], method: str) -> ByChance:
    """As many runs on each task as there are of a method, of the tasks that have a yardstick."""
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
