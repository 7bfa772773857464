"""Families of policies, to see what quality a cost buys: the best of each family for a budget, on average over tasks.

They are chosen and shown on the same tables: what is best here is a hint what to try on others, not what to expect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from benchmarks.replay.guided import Guided
from benchmarks.replay.policies import Policy
from benchmarks.replay.shares import Rule
from benchmarks.replay.study import BASELINE, MOST, POLICIES, Replayed, replay
from benchmarks.replay.table import Table
from benchmarks.replay.truth import Keep, complete_seeds, seed_spread

BUDGETS = (2.0, 3.0, 4.0, 6.0, 10.0, math.inf)


LADDERS: tuple[tuple[tuple[float, float], ...], ...] = (
    *(((share, 1.0),) for share in (1 / 27, 1 / 9, 1 / 3, 2 / 3, 1.0)),
    *(((early, kept), (1 / 3, 1.0)) for early, kept in product((1 / 27, 1 / 9), (1 / 3, 2 / 3))),
    *(((early, kept), (1.0, 1.0)) for early, kept in product((1 / 9, 1 / 3), (1 / 4, 1 / 3, 1 / 2, 2 / 3))),
    *(((1 / 9, kept), (1 / 3, again), (1.0, 1.0)) for kept, again in product((1 / 3, 1 / 2, 2 / 3), (1 / 3, 1 / 2))),
)


def rules(widths: Sequence[float]) -> Iterator[Rule]:
    """Sweeps at these widths."""
    for width, tried, rungs, finalists in product(widths, (1 / 8, 1 / 4, 1 / 2, 1.0), LADDERS, (1, 2, 3, 4)):
        yield Rule(width, tried, rungs, finalists)
        if finalists == 4 and width < 1:
            yield Rule(width, tried, rungs, finalists, raced=True)


def guided(width: float) -> Iterator[Guided]:
    """Sweeps at a width that a model of the scores goes on with."""
    ladders = (((1.0, 1.0),), ((1 / 3, 1 / 3), (1.0, 1.0)), ((1 / 9, 1 / 2), (1 / 3, 1 / 2), (1.0, 1.0)))
    for first, batches, rungs, finalists in product((1 / 8, 1 / 4, 1 / 2), ((4,), (8,), (4, 4)), ladders, (1, 2, 3)):
        for early in (0, 4):
            yield Guided(width, first, batches, rungs, finalists, early)


def measured(
    tables: Mapping[str, Table], policies: Mapping[str, Policy], keep: Keep = "last"
) -> dict[str, dict[str, tuple[float, ...]]]:
    """By policy and task: cost, share of runs no more than one standard deviation behind the best, and behind ASHA."""
    found: dict[str, dict[str, tuple[float, ...]]] = {name: {} for name in policies}
    for task, table in tables.items():
        full = complete_seeds(table, 1.0)
        spread, of_test = seed_spread(table, full, keep=keep), seed_spread(table, full, "test", keep)
        got = replay(table, policies, resamples=20, keep=keep)
        for name, replayed in got.items():
            found[name][task] = _summary(replayed, got[BASELINE], spread, of_test)
    return found


def _summary(got: Replayed, baseline: Replayed, spread: float, of_test: float) -> tuple[float, ...]:
    good = (got.regret <= spread).mean()
    not_worse = (got.test - baseline.test >= -of_test).mean()
    return (
        float(got.cost.mean()),
        float(np.minimum(got.regret / spread, MOST).mean()),
        float(good),
        float(not_worse),
    )


def page(tables: Mapping[str, Table], keep: Keep = "last") -> str:
    """For each budget the policies that are best on average over tasks."""
    ready = {name: table for name, table in tables.items() if len(complete_seeds(table, 1 / 8, 1.0)) > 1}
    policies: dict[str, Policy] = {name: POLICIES[name] for name in (BASELINE, "today", "2 at random")}
    family: list[Rule | Guided] = [*rules([1 / 8, 1.0]), *guided(1 / 8)]
    policies |= {policy.name: policy for policy in family}
    found = measured(ready, policies, keep)
    mean = {name: np.mean(list(of_task.values()), 0) for name, of_task in found.items()}
    head = ["at most", "policy", "mean cost", "mean regret", "within 1 of the best", "not worse than ASHA by 1"]
    lines = [f"| {' | '.join(head)} |"]
    lines += ["|---|---|---|---|---|---|"]
    shown = [("", name) for name in (BASELINE, "today", "2 at random")]
    for budget in BUDGETS:
        allowed = [name for name in policies if name != BASELINE and mean[name][0] <= budget]
        shown += [(f"{budget:g}", name) for name in sorted(allowed, key=lambda name: mean[name][1])[:4]]
    lines += [f"| {at} | {n} | " + " | ".join(f"{value:.2f}" for value in mean[n]) + " |" for at, n in shown]
    return f"Means over {len(ready)} tasks, of regret up to {MOST}: {', '.join(ready)}.\n\n" + "\n".join(lines)
