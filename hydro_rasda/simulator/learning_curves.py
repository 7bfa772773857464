"""Learning curves as rows, one for each trial and epoch: of a CSV file, of a pandas frame, or as others bring them."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hydro_rasda.checks import check_mode, require
from hydro_rasda.schedulers import Mode
from hydro_rasda.simulator.past_run import PastRun, Stretch, continued, costs, restart_seconds
from hydro_rasda.simulator.workload import Workload

MOST_EPOCHS = 100_000
"""Of a trial; what is more is taken for a mistake, such as steps in place of epochs."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "trial": ("trial", "trial_id"),
    "epoch": ("epoch", "training_iteration"),
    "seconds": ("seconds", "epoch_seconds", "time_this_iter_s"),
    "workers": ("workers",),
}
"""Names that a column may have."""

NEEDED = ("trial", "epoch")


class Row(NamedTuple):
    """One epoch of one trial.

    Attributes:
        epoch: From 1; epochs that have no row are filled in from their neighbours.
        score: After it; not finite where the trial diverged.
        seconds: That it took; NaN where they are not known.
        workers: That it took them on.
    """

    trial: str
    epoch: int
    score: float
    seconds: float = math.nan
    workers: int = 1


def of_rows(rows: Iterable[Row], mode: Mode, failed: Collection[str] = (), gaps: Sequence[float] = ()) -> PastRun:
    """A past run, of its rows; the last of several for one epoch counts.

    Args:
        failed: Trials that have no scores after their last row because they failed.
        gaps: Seconds that trials did not train when they were resized.
    """
    of: dict[str, dict[int, Row]] = {}
    for row in rows:
        of.setdefault(row.trial, {})[row.epoch] = row
    scores = np.full((len(of), max(max(epochs) for epochs in of.values())), np.nan)
    stretches: dict[Stretch, dict[int, float]] = {}
    for i, (trial, epochs) in enumerate(of.items()):
        for epoch, row in epochs.items():
            scores[i, epoch - 1] = row.score if math.isfinite(row.score) else math.inf
            if 0 < row.seconds < math.inf:
                stretches.setdefault(Stretch(row.workers, epoch, epoch), {})[i] = row.seconds * row.workers
        if trial in failed:
            scores[i, max(epochs) :] = math.inf
    seconds, relative = costs(stretches)
    work = np.array([relative.get(i, 1.0) for i in range(len(of))])
    workload = Workload(continued(scores), work, mode)
    return PastRun(workload, seconds, restart_seconds(gaps), len(gaps))


def read_csv(path: Path, metric: str | None, mode: Mode | None) -> PastRun:
    """A CSV file with a heading: see `read_columns`."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file)
            names, rows = list(lines.fieldnames or ()), list(lines)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"`run` is {str(path)!r}, but must be a CSV file in UTF-8: {error}") from error
    return read_columns({name: [row[name] for row in rows] for name in names}, metric, mode)


def read_columns(columns: Mapping[str, Sequence[Any]], metric: str | None, mode: Mode | None) -> PastRun:
    """Columns of equal length: trial, epoch, a metric, and, where they are known, seconds and workers of the epoch.

    Args:
        columns: By name; see `COLUMNS` for what each may be called.
        metric: The column of scores; None where there is but one other.
    """
    found = {what: next((name for name in names if name in columns), None) for what, names in COLUMNS.items()}
    for what in NEEDED:
        require(found[what] is not None, "run", list(columns), f"columns, among them {' or '.join(COLUMNS[what])}")
    others = [name for name in columns if name not in found.values()]
    chosen = others[0] if metric is None and len(others) == 1 else metric
    require(chosen in others, "metric", chosen, f"one of the columns {others}")
    checked = needed_mode(mode)
    rows = []
    for i in range(len(columns[str(chosen)])):
        at = {what: columns[name][i] for what, name in found.items() if name is not None}
        rows.append(
            Row(
                trial=str(at["trial"]),
                epoch=_epoch(at["epoch"], i),
                score=_number(chosen, columns[str(chosen)][i], i),
                seconds=_number(found["seconds"], at.get("seconds"), i),
                workers=_workers(_number(found["workers"], at.get("workers"), i), i),
            )
        )
    require(bool(rows), "run", "a table without rows", "one with a row for each trial and epoch")
    return of_rows(rows, checked)


def needed_mode(mode: Mode | None) -> Mode:
    """The mode, which the run does not tell; ValueError if it is not given, or unknown."""
    check_mode(mode)
    assert mode is not None
    return mode


def check_epoch(epoch: float, where: str) -> int:
    """An epoch's number; ValueError if it is no integer from 1 to `MOST_EPOCHS`."""
    holds = math.isfinite(epoch) and epoch == int(epoch) and 1 <= epoch <= MOST_EPOCHS
    require(holds, "epoch", epoch, f"an integer from 1 to {MOST_EPOCHS:,} ({where})")
    return int(epoch)


def _epoch(value: Any, row: int) -> int:
    return check_epoch(_number("epoch", value, row), f"row {row + 1}")


def _workers(value: float, row: int) -> int:
    """One where they are not told."""
    holds = math.isnan(value) or (1 <= value < math.inf and value == int(value))
    require(holds, "workers", value, f"an integer >= 1 (row {row + 1})")
    return 1 if math.isnan(value) else int(value)


def _number(name: str | None, value: Any, row: int) -> float:
    """A cell; an empty one is NaN, and so is one of a column that is not there."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` is {value!r} in row {row + 1}, but must be a number") from error
