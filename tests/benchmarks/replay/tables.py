"""Small replay tables whose best configuration is known."""

from __future__ import annotations

import numpy as np

from benchmarks.replay.policies import Search, Tables
from benchmarks.replay.table import About, Table, empty


def table_of(curves: np.ndarray, max_t: int = 9, seeds: int = 2, branches: tuple[tuple[int, float], ...] = ()) -> Table:
    """Full-width curves [config, epoch], lower is better; those at 1/8 are the same, and cost a tenth."""
    configs = [{"lr": 0.1 * (1 + i), "schedule": "cosine", "batch_size": 32} for i in range(len(curves))]
    about = About("digits", "min", max_t, configs, [1 / 8, 1.0], list(range(seeds)), branches=[*branches])
    table = empty(about)
    table.scores[...] = curves[:, :, None]
    table.seconds[0], table.seconds[1] = 1.0, 10.0
    return table


def parallel(configs: int, max_t: int = 9) -> np.ndarray:
    """Curves that never cross; the last configuration is the best."""
    return np.arange(configs, 0, -1)[:, None] + np.linspace(1, 0, max_t)[None]


def search(table: Table) -> Search:
    return Search(Tables(table), 0, range(len(table.about.configs)))
