"""Read a past run of any format: a run of this library, a CSV file, a data frame or a Ray Tune experiment.

All other modules read past runs through `read_past_run`. To read an experiment, Ray is not needed: the `result.json` or
`progress.csv` of each trial is read.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hydro_rasda.common.argument_checks import check_mode, check_path, check_text, is_metric, require
from hydro_rasda.run.run_json import SPEC
from hydro_rasda.schedulers import Mode
from hydro_rasda.settings.objectives import split_metrics
from hydro_rasda.simulator.past_run import PastRun, Stretch, continued, costs, read_run, restart_seconds
from hydro_rasda.simulator.workload import Workload

if TYPE_CHECKING:
    import pandas as pd


MOST_EPOCHS = 100_000
"""Most epochs of a trial. A larger number is taken for a mistake, for example a column of steps instead of epochs."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "trial": ("trial", "trial_id"),
    "epoch": ("epoch", "training_iteration"),
    "seconds": ("seconds", "epoch_seconds", "time_this_iter_s"),
    "workers": ("workers",),
}
"""Names that each column may have."""

NEEDED = ("trial", "epoch")


class EpochRow(NamedTuple):
    """An epoch of one trial, counted from 1. NaN seconds are unknown. A NaN score is unknown, or the trial diverged."""

    trial: str
    epoch: int
    score: float
    seconds: float = math.nan
    workers: int = 1


def of_rows(
    rows: Iterable[EpochRow], metric: str, mode: Mode, failed: Collection[str] = (), gaps: Sequence[float] = ()
) -> PastRun:
    """Make a past run from rows of epochs. If an epoch has several rows, the last known values count.

    Raise ValueError if no score is finite.

    `failed` names the trials that failed. `gaps` has the seconds of each resize.
    """
    of: dict[str, dict[int, EpochRow]] = {}
    for row in rows:
        epochs = of.setdefault(row.trial, {})
        epochs[row.epoch] = _merged(epochs.get(row.epoch, row), row)
    scores = np.full((len(of), max(max(epochs) for epochs in of.values())), np.nan)
    stretches: dict[Stretch, dict[int, float]] = {}
    for i, epochs in enumerate(of.values()):
        for epoch, row in epochs.items():
            scores[i, epoch - 1] = row.score if math.isfinite(row.score) else np.nan
            if 0 < row.seconds < math.inf:
                stretches.setdefault(Stretch(row.workers, epoch, epoch), {})[i] = row.seconds * row.workers
    known = np.isfinite(scores)
    validated = known.any(axis=0)
    require(bool(validated.any()), "metric", metric, "one with a finite score")
    for i, (trial, epochs) in enumerate(of.items()):
        last = max((epoch for epoch in epochs if known[i, epoch - 1]), default=0)
        for epoch, row in epochs.items():
            if math.isinf(row.score) or (math.isnan(row.score) and epoch > last and validated[epoch - 1]):
                scores[i, epoch - 1] = math.inf  # the trial diverged; other NaN scores are epochs without validation
        if trial in failed:
            scores[i, max(epochs) :] = math.inf
    seconds, relative = costs(stretches)
    work = np.array([relative.get(i, 1.0) for i in range(len(of))])
    workload = Workload(continued(scores), work, mode)
    return PastRun(workload, seconds, restart_seconds(gaps), len(gaps))


def _merged(before: EpochRow, row: EpochRow) -> EpochRow:
    if math.isnan(row.score):
        row = row._replace(score=before.score)
    return row._replace(seconds=before.seconds, workers=before.workers) if math.isnan(row.seconds) else row


def read_csv(path: Path, metric: str | None, mode: Mode | None) -> PastRun:
    """Read a CSV file with a header; see `read_columns`."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file)
            names, rows = list(lines.fieldnames or ()), list(lines)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"`run` is {str(path)!r}, but must be a CSV file in UTF-8: {error}") from error
    return read_columns({name: [row[name] for row in rows] for name in names}, metric, mode)


def read_columns(columns: Mapping[str, Sequence[Any]], metric: str | None, mode: Mode | None) -> PastRun:
    """Read columns of equal length (see `COLUMNS`): trial, epoch, a metric, and if known, seconds and workers."""
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
        require(at["trial"] not in (None, ""), "trial", at["trial"], f"given (row {i + 1})")
        value = _number(found["workers"], at.get("workers"), i)
        holds = math.isnan(value) or (1 <= value < math.inf and value == int(value))
        require(holds, "workers", value, f"an integer >= 1 (row {i + 1})")
        rows.append(
            EpochRow(
                trial=str(at["trial"]),
                epoch=check_epoch(_number("epoch", at["epoch"], i), f"row {i + 1}"),
                score=_number(chosen, columns[str(chosen)][i], i),
                seconds=_number(found["seconds"], at.get("seconds"), i),
                workers=1 if math.isnan(value) else int(value),
            )
        )
    require(bool(rows), "run", "a table without rows", "one with a row for each trial and epoch")
    return of_rows(rows, str(chosen), checked)


def needed_mode(mode: Mode | None) -> Mode:
    """Return `mode`, because these formats do not contain one; raise ValueError if it is None or unknown."""
    check_mode(mode)
    assert mode is not None
    return mode


def check_epoch(epoch: float, where: str) -> int:
    """Return an epoch's number; raise ValueError, naming `where`, unless it is an integer from 1 to `MOST_EPOCHS`."""
    holds = math.isfinite(epoch) and epoch == int(epoch) and 1 <= epoch <= MOST_EPOCHS
    require(holds, "epoch", epoch, f"an integer from 1 to {MOST_EPOCHS:,} ({where})")
    return int(epoch)


def _number(name: str | None, value: Any, row: int) -> float:
    """Return the number in a cell; NaN if the cell is empty, or if there is no such column."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` is {value!r} in row {row + 1}, but must be a number") from error


Report = Mapping[str, Any]

RESULT, PROGRESS, STATE = "result.json", "progress.csv", "experiment_state-*.json"

_TUNES = {
    *("checkpoint_dir_name", "date", "done", "epoch", "epoch_seconds", "experiment_tag", "global_batch_size"),
    *("hostname", "iterations_since_restore", "node_ip", "pid", "should_checkpoint", "time_since_restore"),
    *("time_this_iter_s", "time_total_s", "timestamp", "timesteps_total", "training_iteration", "trial_id", "workers"),
}
"""Keys of a report that are not metrics."""


def is_experiment(folder: Path) -> bool:
    """Return whether a folder contains trials of Ray Tune."""
    return next(_trial_folders(folder), None) is not None


def read_experiment(folder: Path, metric: str | None, mode: Mode | None) -> PastRun:
    """Read the reports of all trials of a Ray Tune experiment.

    An epoch is a `training_iteration`. Its seconds are the reported `epoch_seconds`, or else Tune's `time_this_iter_s`.
    For the first epoch after a start, Tune's time includes the start, so the seconds of this epoch are unknown (NaN).
    Such times count only if no report of any trial has a time without a start. The workers of an epoch are the reported
    `workers` of elastic trials, or else 1.

    A restart lies between the reports of two consecutive epochs with different numbers of workers. Its seconds are the
    time between the reports without the seconds of the epoch. It counts only if both reports have timestamps, and if
    any report has a time without a start.
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
    return of_rows(rows, str(chosen), checked, failed, [gap for gap in gaps if gap is not None])


def _state(folder: Path) -> tuple[str | None, set[str]]:
    """Return the requested metric and the folders of failed trials, from the experiment's last snapshot."""
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
    """Yield the reports of a trial; an incomplete last line is left out."""
    if (trial / RESULT).is_file() and (trial / RESULT).stat().st_size:
        with open(trial / RESULT, encoding="utf-8") as file:
            for raw in file:
                try:
                    line = json.loads(raw)
                except ValueError:
                    return
                if "training_iteration" in line:
                    yield _flat(line)
    elif (trial / PROGRESS).is_file():
        with open(trial / PROGRESS, newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if None not in line.values():  # a line that a killed process left has fewer cells
                    yield {name: _plain(cell) for name, cell in line.items()}


def _flat(report: Report, within: str = "") -> dict[str, Any]:
    """Flatten nested dicts, with names as in Tune's schedulers and CSV files, for example `val/loss`."""
    found: dict[str, Any] = {}
    for name, value in report.items():
        nested = isinstance(value, dict)
        found |= _flat(value, f"{within}{name}/") if nested else {f"{within}{name}": value}
    return found


def _plain(cell: str) -> Any:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return cell


def _row(trial: str, line: Report, metric: str, some_timed: bool) -> EpochRow:
    value, seconds = line[metric], _seconds(line)
    return EpochRow(
        trial=trial,
        epoch=check_epoch(line["training_iteration"], trial),
        score=float(value) if is_metric(value) else math.nan,
        seconds=seconds if some_timed else float(line.get("time_this_iter_s") or math.nan),
        workers=_workers_ray_tune(line),
    )


def _seconds(line: Report) -> float:
    """Return the seconds of the epoch alone; NaN if none are known, or only their sum with the time of a start."""
    began = line.get("iterations_since_restore") == 1
    return float(line.get("epoch_seconds") or (not began and line.get("time_this_iter_s")) or math.nan)


def _usual_seconds(lines: Iterable[Report]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for line in lines:
        if (seconds := _seconds(line)) > 0:
            found.setdefault(_workers_ray_tune(line), []).append(seconds)
    return {workers: median(each) for workers, each in found.items()}


def _workers_ray_tune(line: Report) -> int:
    return max(1, int(line.get("workers") or 1))


def _resized(before: Report, line: Report) -> bool:
    """Return whether a trial's number of workers changed between two reports that follow each other.

    Return False if reports are missing between the two, which can happen when Tune resumes.
    """
    next_one = line["training_iteration"] == before["training_iteration"] + 1
    return next_one and _workers_ray_tune(before) != _workers_ray_tune(line)


def _gap(before: Report, line: Report, usual: Mapping[int, float]) -> float | None:
    """Return the seconds between two reports in which the trial did not train; None if they are not known.

    `usual` maps numbers of workers to usual seconds of an epoch, for a report that does not tell them.
    """
    seconds = _seconds(line)
    if not usual or "timestamp" not in before or "timestamp" not in line:
        return None
    trained = usual.get(_workers_ray_tune(line), median(usual.values())) if math.isnan(seconds) else seconds
    return max(0.0, float(line["timestamp"]) - float(before["timestamp"]) - trained)


def _columns_of(frame: pd.DataFrame) -> dict[str, list[Any]]:
    """Return the columns of a frame. A missing value is None, whatever pandas calls it."""
    names = [str(name) for name in frame.columns]
    require(len({*names}) == len(names), "run", names, "columns of different names")
    cells = frame.astype(object).where(frame.notna(), None)
    return {name: cells.iloc[:, i].tolist() for i, name in enumerate(names)}


def read_past_run(run: str | Path | pd.DataFrame, metric: str | None = None, mode: Mode | None = None) -> PastRun:
    """Read a past run, or learning curves from another source.

    Args:
        run: The folder of a run of this library or of a Ray Tune experiment, a CSV file, or a pandas frame. A file or
            frame has a row for each trial and epoch. Its columns are trial (or trial_id), epoch (or
            training_iteration), a metric, and, if known, the seconds and workers of the epoch. An empty score means
            that the trial diverged, if other trials have a score for that epoch and this trial has no later score.
            Other empty scores are unknown.
        metric: The name of the score. None for the metric that the run itself records, or else for the only one.
        mode: "min" if a lower score is better, "max" if a higher one is. None for a run of this library, which knows
            its mode.

    Raises:
        FileNotFoundError: if there is no such file, or the folder contains no run.
        ValueError: if the run cannot be read, or `metric` or `mode` is missing or wrong.
    """
    check_text("metric", metric, optional=True)
    if mode is not None:
        check_mode(mode)
    if not isinstance(run, (str, PathLike)):
        require(hasattr(run, "columns"), "run", run, "a path, or a pandas frame")
        return read_columns(_columns_of(run), metric, mode)
    check_path("run", run)
    path = Path(run).expanduser()
    if path.is_file():
        return read_csv(path, metric, mode)
    if path.is_dir() and not (path / SPEC).exists() and is_experiment(path):
        return read_experiment(path, metric, mode)
    if path.is_dir() and (path / SPEC).exists():
        past = read_run(path)
        own, own_mode, _ = split_metrics(past.settings["metric"], past.settings["mode"])
        for name, asked, known in (("metric", metric, own), ("mode", mode, own_mode)):
            require(asked in (None, known), name, asked, f"the run's, {known!r}")
        return past
    inside = [child.name for child in sorted(path.glob("*/")) if (child / SPEC).exists() or is_experiment(child)]
    raise FileNotFoundError(
        f"`run` is {str(run)!r}, but must be the folder of a run, which holds {SPEC}, that of a Ray Tune experiment, "
        "or a CSV file" + (f": in it are {', '.join(inside)}" if inside else "")
    )
