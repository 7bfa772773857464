"""Few configurations: whether surrogates still pay, where most of what a sweep tries becomes a finalist anyway."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.replay.policies import Policy, Tune, asha, race, today
from benchmarks.replay.study import MOST, comparable, replay
from benchmarks.replay.table import Table
from benchmarks.replay.truth import complete_seeds, seed_spread

COUNTS = (4, 5, 6, 8, 12, 16)
RESAMPLES = 50
POLICIES: dict[str, Policy] = {
    "today": today,
    "swept at full width (`surrogate=1`)": Tune(width=1.0),
    "all raced, none swept": lambda search: race(search, list(search.numbers), prior=False),
    "ASHA": asha,
}


def page(tables: Mapping[str, Table], resamples: int = RESAMPLES) -> str:
    """For each number of configurations and policy, means over tasks; best epochs are kept, of averaged weights."""
    ready = comparable(tables)
    if not ready:
        return ""
    head = ["configurations", *(f"{name}: cost | regret" for name in POLICIES)]
    lines = [f"Means over {len(ready)} tasks: {', '.join(ready)}.", "", f"| {' | '.join(head)} |"]
    lines.append(f"|{'---|' * (1 + 2 * len(POLICIES))}")
    for count in COUNTS:
        rows = [_row(table, count, resamples) for table in ready.values()]
        lines.append(f"| {count} | {' | '.join(f'{value:.2f}' for value in np.mean(rows, 0))} |")
    return "\n".join(lines)


def _row(table: Table, count: int, resamples: int) -> list[float]:
    """Mean cost and regret of each policy, on random subsets of so many configurations."""
    spread = seed_spread(table, complete_seeds(table, 1.0), keep="best")
    found = replay(table, POLICIES, resamples, "best", share=count / len(table.about.configs))
    pairs = [(got.cost.mean(), np.minimum(got.regret / spread, MOST).mean()) for got in found.values()]
    return [float(value) for pair in pairs for value in pair]
