"""Measurements of a past run: learning curves and the time of an epoch. Also reads them from a run of this library.

Reading writes nothing, so that a run in progress can be read, too.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from fusion.keys import read
from hydro_rasda.history.full_size import trained_spans
from hydro_rasda.history.history import GROUP, HEATS, heat_of, named_as_sweep
from hydro_rasda.history.lines import Unit, score_in
from hydro_rasda.run.journal import JOURNAL, read_units
from hydro_rasda.run.run_json import SPEC, read_spec
from hydro_rasda.settings.objectives import split_metrics
from hydro_rasda.simulator.workload import Floats, Workload


class SweepCost(NamedTuple):
    """The cost of the surrogates, in the sweep and in the middle heat, on the devices of the past run.

    Attributes:
        device_seconds: Device time of all groups together.
        longest: Sum over rungs of the seconds of each rung's slowest group. A sweep takes at least this time on any
            number of devices.
    """

    trials: int
    device_seconds: float
    longest: float
    epochs: int


@dataclass(frozen=True)
class PastRun:
    """Measurements of a past run.

    Attributes:
        workload: All trials, in the order of the run. `work` is measured by comparing trials over the same epochs. In a
            run of this library, these are epochs at full size. A trial that has no such epochs has a `work` of 1.
        epoch_seconds: Median time of a full-size epoch on one device of that run, for a trial whose `work` is 1; None
            if no epoch was timed.
        restart_seconds: Seconds from a resize to the next step, as measured in the run; None if it had no resizes.
        resizes: Number of these resizes.
        parameters: Number of parameters of the full-size model; None if unknown.
        gradient_bytes: Size of the model's gradients; 0 if unknown.
        steps: Steps of an epoch at the trials' median batch size; None if the size of the data is unknown.
        sweep: Cost of the surrogates; None if there were none.
        finalists: The trials that trained at full size after a sweep, as a workload; None if there were none.
        settings: The settings of the run (`run.json`); empty if another program made the run. After a middle heat,
            "top_k" is the number of trials that it chose for full size.
    """

    workload: Workload
    epoch_seconds: float | None = None
    restart_seconds: float | None = None
    resizes: int = 0
    parameters: int | None = None
    gradient_bytes: int = 0
    steps: float | None = None
    sweep: SweepCost | None = None
    finalists: Workload | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def continued(scores: Floats) -> Floats:
    """Fill in the scores [N, T] of epochs that a trial did not train (NaN); inf stands for failure and becomes NaN.

    A missing score changes from epoch to epoch by the average change of the trials that trained the epoch. If no trial
    trained it, the score stays the same. So trials that were stopped together keep their order. Before a trial's first
    score, that score is used.

    >>> continued(np.array([[5.0, 3.0, 2.0], [6.0, np.nan, np.nan]])).tolist()
    [[5.0, 3.0, 2.0], [6.0, 4.0, 3.0]]
    """
    filled = scores.copy()
    first = np.isnan(scores).argmin(axis=1)
    for i, t in enumerate(first):
        filled[i, :t] = scores[i, t]
    for t in range(1, scores.shape[1]):
        steps = scores[:, t] - np.where(np.isfinite(scores[:, t - 1]), scores[:, t - 1], np.nan)
        steps = steps[np.isfinite(steps)]
        mean = float(steps.mean()) if steps.size else 0.0
        filled[:, t] = np.where(np.isnan(filled[:, t]), filled[:, t - 1] + mean, filled[:, t])
    return np.where(np.isfinite(filled), filled, np.nan)


class Stretch(NamedTuple):
    """Epochs that trials trained at full size, with the same number of workers in each trial."""

    workers: int
    first: int
    last: int


def costs(stretches: Mapping[Stretch, Mapping[int, float]]) -> tuple[float | None, dict[int, float]]:
    """Return the seconds of an epoch on one device, and the cost of each trial relative to these seconds.

    A machine's speed changes with other programs, and with the number of trials that are left. So a trial is compared
    with the median of all trials that trained the same epochs on the same number of workers. For this median, the
    seconds of a trial are divided by the trial's relative cost so far. Epochs that a trial trained alone do not change
    its cost. The cost of a trial is the median of its comparisons. The returned seconds are the median over epochs on
    the fewest workers, because more time is lost with more workers; None if there are no stretches.

    Args:
        stretches: `stretches[stretch][trial]` is the seconds that an epoch of the stretch would have taken on one
            worker.
    """
    compared: dict[int, list[float]] = {}  # sorted, so that a median takes no time
    for _, seconds in sorted(stretches.items()):
        known = [taken / _middle(compared[n]) for n, taken in seconds.items() if n in compared]
        typical = median(known or seconds.values())
        for n, taken in seconds.items():
            insort(compared.setdefault(n, []), taken / typical)
    relative = {n: _middle(ratios) for n, ratios in compared.items()}
    fewest = min((stretch.workers for stretch in stretches), default=1)
    each = [taken / relative[n] for s, of in stretches.items() if s.workers == fewest for n, taken in of.items()]
    return median(each) if each else None, relative


def _middle(ordered: Sequence[float]) -> float:
    """Return the lower median of sorted numbers."""
    return ordered[(len(ordered) - 1) // 2]


def restart_seconds(gaps: Sequence[float]) -> float | None:
    """Estimate the seconds of a restart from the pauses at resizes of a run's trials; None without pauses.

    In some pauses, a trial also waited for workers, which is no part of a restart. So the lower quartile is returned.
    """
    return sorted(gaps)[(len(gaps) - 1) // 4] if gaps else None


BYTES_PER_PARAMETER = {"torch.float64": 8, "torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}

# Times in a journal are rounded to this number of seconds.
_RESOLUTION = 1e-4

Line = Mapping[str, Any]


def read_run(folder: str | Path) -> PastRun:
    """Read `run.json` and `journal.jsonl` in the folder of a run.

    The curves are those of the surrogates, because every trial has one. If a run had no surrogates, they are those of
    the full-size models. If a trial was stopped early, `continued` fills in its later scores. The scores of a failed
    trial are NaN.
    """
    path = Path(folder)
    for name in (SPEC, JOURNAL):
        if not (path / name).exists():
            raise FileNotFoundError(f"`run` is {str(folder)!r}, but must be a run's folder: it holds no {name}")
    settings = read_spec(path)
    units = read_units(path / JOURNAL).units
    lines = [line for unit in units.values() for line in unit.lines]
    heats = {line["heat"] for line in lines if line["event"] == "metrics"}
    if not heats:
        raise ValueError(f"`run` is {str(folder)!r}, but must have trained at least one epoch: its journal has none")
    seconds, relative = costs(_stretches(units))
    first = "sweep" if "sweep" in heats else "race"
    workloads = {heat: _workload(units, heat, heat == first, settings, relative) for heat in heats}
    gaps, plan = _resizes(units), units[HEATS].value if HEATS in units else None
    if isinstance(plan, Mapping):  # a middle heat chose the trials that train at full size
        settings["top_k"] = plan["finalists"]
    sizes = [_size(text) for text in settings["model"].values()]
    return PastRun(
        workload=workloads[first],
        epoch_seconds=seconds,
        restart_seconds=restart_seconds(gaps),
        resizes=len(gaps),
        parameters=sum(count for count, _ in sizes),
        gradient_bytes=sum(count * width for count, width in sizes),
        steps=_steps(settings["train_data"], lines),
        sweep=_sweep(units),
        finalists=workloads.get("race"),
        settings=settings,
    )


def _workload(
    units: Mapping[str, Unit], heat: str, of_all: bool, settings: Mapping[str, Any], work: Mapping[int, float]
) -> Workload:
    metric, mode, _ = split_metrics(settings["metric"], settings["mode"])
    # Curves of surrogates leave out the race, because a failure at full size says nothing about the trial's surrogate.
    own = [unit for key, unit in units.items() if heat == "race" or not key.startswith("race/")]
    lines = (line for unit in own for line in unit.lines)
    numbers, scores = _curves(lines, heat, of_all, metric, int(settings["max_t"]))
    return Workload(continued(scores), np.array([work.get(n, 1.0) for n in numbers]), mode)


def _curves(lines: Iterable[Line], heat: str, of_all: bool, metric: str, max_t: int) -> tuple[list[int], Floats]:
    """Return the curves of a heat. With `of_all`, include trials that failed before their first epoch."""
    curves: dict[int, Floats] = {}
    for line in lines:
        if line["event"] == "metrics" and line["heat"] == heat:
            curve = curves.setdefault(line["trial"], np.full(max_t, np.nan))
            value = score_in(line, metric)
            curve[line["epoch"] - 1] = math.inf if value is None else value
        elif line["event"] == "failed" and (of_all or line["trial"] in curves):
            curve = curves.setdefault(line["trial"], np.full(max_t, np.nan))
            curve[np.isnan(curve)] = math.inf
    numbers = sorted(curves)
    return numbers, np.stack([curves[number] for number in numbers])


def _full_size(units: Mapping[str, Unit]) -> Iterator[tuple[int, Unit, dict[int, int | None]]]:
    """Yield each journal entry of full-size training: its trial, the entry, and its workers by epoch.

    Workers are None if they are unknown.
    """
    for number, unit in trained_spans(units):
        if epochs := [*_metrics(unit.lines, "race")]:
            yield number, unit, {line["epoch"]: line.get("workers") for line in epochs}


def _metrics(lines: Iterable[Line], heat: str) -> Iterator[Line]:
    return (line for line in lines if line["event"] == "metrics" and line["heat"] == heat)


def _stretches(units: Mapping[str, Unit]) -> dict[Stretch, dict[int, float]]:
    """Map each stretch and trial to the seconds that an epoch would have taken on one worker."""
    found: dict[Stretch, dict[int, float]] = {}
    for trial, unit, told in _full_size(units):
        workers = [count or 1 for count in told.values()]
        seconds = max(unit.seconds, _RESOLUTION) / sum(1 / count for count in workers)
        found.setdefault(Stretch(min(workers), min(told), max(told)), {})[trial] = seconds
    return found


def _resizes(units: Mapping[str, Unit]) -> list[float]:
    """Return the seconds of each pause in which a full-size trial did not train because its workers changed."""
    gaps: list[float] = []
    before: dict[int, tuple[int, float]] = {}
    for trial, unit, told in _full_size(units):
        if (workers := [*told.values()][-1]) is not None:
            had, until = before.get(trial, (workers, 0.0))
            if had != workers:
                gaps.append(max(0.0, unit.at - unit.seconds - until))
            before[trial] = workers, unit.at
    return gaps


def _sweep(units: Mapping[str, Unit]) -> SweepCost | None:
    longest: dict[tuple[str, str], float] = {}
    total = 0.0
    for key, unit in units.items():
        if name := GROUP.fullmatch(named_as_sweep(key)):
            total += unit.seconds
            rung = heat_of(key), name["stop"]
            longest[rung] = max(longest.get(rung, 0.0), unit.seconds)
    epochs = [line["trial"] for unit in units.values() for line in _metrics(unit.lines, "sweep")]
    return SweepCost(len(set(epochs)), total, sum(longest.values()), len(epochs)) if total and epochs else None


def _steps(train_data: str, lines: Iterable[Line]) -> float | None:
    """Return the steps of an epoch, for data described as "tensors (256, 8) float32, ..." or "MyDataset of 256"."""
    length = re.match(r"tensors \((\d+)", train_data) or re.search(r" of (\d+)$", train_data)
    default = read({}, "batch_size")
    sizes = [int(line["config"].get("batch_size", default)) for line in lines if line["event"] == "trial"]
    return max(1.0, int(length[1]) / median(sizes)) if length and sizes else None


def _size(text: str) -> tuple[int, int]:
    """Return the number of elements and the bytes of each for a text such as "(64, 32) torch.float32"."""
    shape, _, dtype = text.rpartition(" ")
    return math.prod(int(n) for n in re.findall(r"\d+", shape)), BYTES_PER_PARAMETER.get(dtype, 4)
