"""The folder of a Ray Tune experiment, read without Ray: `result.json`, or `progress.csv`, of each trial."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from hydro_rasda.checks import is_metric, require
from hydro_rasda.schedulers import Mode
from hydro_rasda.simulator.learning_curves import Row, check_epoch, needed_mode, of_rows
from hydro_rasda.simulator.past_run import PastRun

Report = Mapping[str, Any]

RESULT, PROGRESS, STATE = "result.json", "progress.csv", "experiment_state-*.json"

_TUNES = {
    "checkpoint_dir_name",
    "date",
    "done",
    "epoch",
    "epoch_seconds",
    "experiment_tag",
    "global_batch_size",
    "hostname",
    "iterations_since_restore",
    "node_ip",
    "pid",
    "should_checkpoint",
    "time_since_restore",
    "time_this_iter_s",
    "time_total_s",
    "timestamp",
    "timesteps_total",
    "training_iteration",
    "trial_id",
    "workers",
}
"""Keys of a report besides its metrics."""


def is_experiment(folder: Path) -> bool:
    """Return whether trials of Ray Tune's lie in a folder."""
    return next(_trial_folders(folder), None) is not None


def read_experiment(folder: Path, metric: str | None, mode: Mode | None) -> PastRun:
    """Reads the reports of all trials.

    An epoch is a `training_iteration`. Its seconds are the reported `epoch_seconds`, or else Tune's `time_this_iter_s`,
    but not of the first epoch since a start, which counts the start as well. Its workers are the reported `workers`, as
    of elastic trials, else one. A restart is what lies between two reports on different workers, but for the epoch.
    """
    reports = {trial.name: list(_reports(trial)) for trial in sorted(_trial_folders(folder))}
    reported = {name for lines in reports.values() for line in lines for name in line if is_metric(line[name])}
    names = sorted(name for name in reported - _TUNES if not name.startswith(("config", "perf/")))
    require(bool(names), "run", str(folder), "an experiment whose trials have reported a metric")
    asked, failed = _state(folder)
    chosen = metric or asked or (names[0] if len(names) == 1 else None)
    require(chosen in names, "metric", chosen, f"one of {names}")
    checked = needed_mode(mode)
    found = {trial: [line for line in lines if str(chosen) in line] for trial, lines in reports.items()}
    usual = _usual_seconds(line for lines in found.values() for line in lines)
    rows = [_row(trial, line, str(chosen), bool(usual)) for trial, lines in found.items() for line in lines]
    gaps = [_gap(*both, usual) for lines in found.values() for both in pairwise(lines) if _resized(*both)]
    return of_rows(rows, checked, failed, [gap for gap in gaps if gap is not None])


def _state(folder: Path) -> tuple[str | None, set[str]]:
    """The metric that was asked for, and the folders of trials that failed; of the experiment's last snapshot."""
    snapshots = sorted(folder.glob(STATE))
    if not snapshots:
        return None, set()
    state = json.loads(snapshots[-1].read_text(encoding="utf-8"))
    trials = [json.loads(trial) for trial, *_ in state.get("trial_data", [])]
    failed = {str(trial.get("relative_logdir")) for trial in trials if trial.get("status") == "ERROR"}
    return state.get("runner_data", {}).get("_metric"), failed


def _trial_folders(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if (path / RESULT).is_file() or (path / PROGRESS).is_file())


def _reports(trial: Path) -> Iterator[Report]:
    """The lines of a trial, the last one left out where it is incomplete."""
    if (trial / RESULT).is_file() and (trial / RESULT).stat().st_size:
        with open(trial / RESULT, encoding="utf-8") as file:
            for raw in file:
                try:
                    line = json.loads(raw)
                except ValueError:
                    return
                if "training_iteration" in line:
                    yield line
    elif (trial / PROGRESS).is_file():
        with open(trial / PROGRESS, newline="", encoding="utf-8") as file:
            yield from ({name: _plain(cell) for name, cell in line.items()} for line in csv.DictReader(file))


def _plain(cell: str) -> Any:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell


def _row(trial: str, line: Report, metric: str, some_timed: bool) -> Row:
    value, seconds = line[metric], _seconds(line)
    return Row(
        trial=trial,
        epoch=check_epoch(line["training_iteration"], trial),
        score=float(value) if is_metric(value) else math.nan,
        seconds=seconds if some_timed else float(line.get("time_this_iter_s") or math.nan),
        workers=_workers(line),
    )


def _seconds(line: Report) -> float:
    """Of the epoch alone; NaN where only that with the start before it is known."""
    began = line.get("iterations_since_restore") == 1
    return float(line.get("epoch_seconds") or (not began and line.get("time_this_iter_s")) or math.nan)


def _usual_seconds(lines: Iterable[Report]) -> dict[int, float]:
    """By number of workers, the median time of an epoch."""
    found: dict[int, list[float]] = {}
    for line in lines:
        if (seconds := _seconds(line)) > 0:
            found.setdefault(_workers(line), []).append(seconds)
    return {workers: median(each) for workers, each in found.items()}


def _workers(line: Report) -> int:
    return max(1, int(line.get("workers") or 1))


def _resized(before: Report, line: Report) -> bool:
    """Return whether a trial got other workers between two reports; at a resume, Tune may have lost some between."""
    next_one = line["training_iteration"] == before["training_iteration"] + 1
    return next_one and _workers(before) != _workers(line)


def _gap(before: Report, line: Report, usual: Mapping[int, float]) -> float | None:
    """Seconds between two reports in which the trial did not train; None where it is not known how long it did."""
    seconds = _seconds(line)
    if not usual or "timestamp" not in before or "timestamp" not in line:
        return None
    trained = usual.get(_workers(line), median(usual.values())) if math.isnan(seconds) else seconds
    return max(0.0, float(line["timestamp"]) - float(before["timestamp"]) - trained)
