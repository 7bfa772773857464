"""Over how many steps full-size weights should be averaged: the best configurations of each table, trained once more.

python -m benchmarks.replay horizons
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.replay.table import Table
from benchmarks.replay.training import JUDGED, groups, train
from benchmarks.replay.truth import Floats, best_first, complete_seeds, truth
from benchmarks.tasks.load import load_task
from benchmarks.tasks.task import Task
from hydro_rasda.config import TuneConfig

SHARES = (0.003, 0.01, TuneConfig.ema, 0.1, 0.3)
"""Of a training's steps."""
TRIED, GROUP = 10, 5
"""Configurations of a table, and most that train as one."""
HEAD = """# Averages over how many steps

Drawn by `python -m benchmarks.replay horizons`. The ten best configurations of each replay table, trained at full width
with the table's first seed; of each, the epoch that validated best. `own`: each epoch's last weights; then the better
of these and their average over a share of a training's steps. Validation is the mean over the ten / of the best; test
the mean over the ten of the epochs and weights that validation chose.
"""


def write(tables: dict[str, Table], data: Path, folder: Path) -> Path:
    """Train, and write the page beside the tables' folder."""
    torch.set_num_threads(1)
    names = ["own", *(f"{share:g}" for share in SHARES)]
    lines = [HEAD, f"| task | | {' | '.join(names)} |", f"|{'---|' * (2 + len(names))}"]
    for name, table in tables.items():
        if complete_seeds(table, 1.0):
            validation, test = chosen(*measured(load_task(name, data), table))
            cells = [f"{mean:.4g} / {best:.4g}" for mean, best in zip(validation.mean(0), _best(validation, table))]
            lines.append(f"| {name} | validation | {' | '.join(cells)} |")
            lines.append(f"| | test | {' | '.join(f'{mean:.4g}' for mean in test.mean(0))} |")
            print("\n".join(lines[-2:]), flush=True)
    path = folder.parent / "replay_horizons.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def measured(task: Task, table: Table) -> tuple[Floats, Floats, bool]:
    """Validation and test scores [configuration, epoch, own or averaged], and whether more is better."""
    about, places = table.about, complete_seeds(table, 1.0)
    numbers = best_first(truth(table, places, keep="own"))[:TRIED].tolist()
    most = dict.fromkeys(task.batch_sizes, GROUP)
    trained = [
        train(task, {n: about.configs[n] for n in group}, 1.0, about.seeds[places[0]], SHARES).scores
        for group in groups(about.configs, numbers, most)
    ]
    judged = np.concatenate(trained)[..., 1:].astype(np.float64)
    by_weights = judged.reshape(*judged.shape[:2], 1 + len(SHARES), JUDGED)
    return by_weights[..., 1], by_weights[..., 2], about.mode == "max"


def chosen(validation: Floats, test: Floats, more_is_better: bool) -> tuple[Floats, Floats]:
    """For each configuration [configuration, own or averaged], both scores where the better weights validated best."""
    sign = 1.0 if more_is_better else -1.0
    signed = np.where(np.isnan(validation), -np.inf, sign * validation)
    averaged = signed > signed[..., :1]
    better = np.where(averaged, signed, signed[..., :1])
    tested = np.where(averaged, test, test[..., :1])
    epochs = better.argmax(1)[:, None]
    return sign * np.take_along_axis(better, epochs, 1)[:, 0], np.take_along_axis(tested, epochs, 1)[:, 0]


def _best(validation: Floats, table: Table) -> Floats:
    best: Floats = validation.max(0) if table.about.mode == "max" else validation.min(0)
    return best
