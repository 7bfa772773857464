"""A run of this library's own, read from its folder.

Nothing is written: a run that is still going on can be read, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hydro_rasda.objectives import split_metrics
from hydro_rasda.run.files import read_json
from hydro_rasda.run.journal import JOURNAL, Unit, read_units
from hydro_rasda.simulator.past_run import PastRun, Stretch, Sweep, continued, costs, restart_seconds
from hydro_rasda.simulator.workload import Floats, Workload

ASKED = "run.json"

BYTES_PER_PARAMETER = {"torch.float64": 8, "torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}

# Seconds to which a journal's times are rounded.
_RESOLUTION = 1e-4

# Older runs name units by "from" where the local backend trained them, and by "epoch" where Ray did.
_TARGET_UNIT = re.compile(r"target/trial-(\d+)/(?:to|from|epoch)-\d+")
_SWEEP_UNIT = re.compile(r"surrogate/to-(\d+)/(?:.*/)?group-.*")

Line = Mapping[str, Any]


def read_run(folder: str | Path) -> PastRun:
    """Reads `run.json` and `journal.jsonl` in the folder of a run.

    The curves are those of the surrogates, since every trial has one; where a run has none, those of the full-size
    models. A trial that was stopped early has no scores for later epochs: these are filled in by `continued`. A trial
    that failed has NaN.
    """
    path = Path(folder)
    for name in (ASKED, JOURNAL):
        if not (path / name).exists():
            raise FileNotFoundError(f"`run` is {str(folder)!r}, but must be a run's folder: it holds no {name}")
    settings = read_json(path / ASKED)
    units = read_units(path / JOURNAL).units
    lines = [line for unit in units.values() for line in unit.lines]
    stages = {line["stage"] for line in lines if line["event"] == "metrics"}
    if not stages:
        raise ValueError(f"`run` is {str(folder)!r}, but must have trained at least one epoch: its journal has none")
    seconds, relative = costs(_stretches(units))
    first = "surrogate" if "surrogate" in stages else "target"
    workloads = {stage: _workload(lines, stage, stage == first, settings, relative) for stage in stages}
    gaps = _resizes(units)
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
        finalists=workloads.get("target"),
        settings=settings,
    )


def _workload(
    lines: Iterable[Line], stage: str, of_all: bool, settings: Mapping[str, Any], work: Mapping[int, float]
) -> Workload:
    metric, mode, _ = split_metrics(settings["metric"], settings["mode"])
    numbers, scores = _curves(lines, stage, of_all, metric, int(settings["max_t"]))
    return Workload(continued(scores), np.array([work.get(n, 1.0) for n in numbers]), mode)


def _curves(lines: Iterable[Line], stage: str, of_all: bool, metric: str, max_t: int) -> tuple[list[int], Floats]:
    """The curves of a stage; of the first one, also of those that failed before they had trained an epoch."""
    curves: dict[int, Floats] = {}
    for line in lines:
        if line["event"] == "metrics" and line["stage"] == stage:
            curve = curves.setdefault(line["trial"], np.full(max_t, np.nan))
            value = line.get(metric)
            curve[line["epoch"] - 1] = math.inf if value is None else value
        elif line["event"] == "failed" and (of_all or line["trial"] in curves):
            curve = curves.setdefault(line["trial"], np.full(max_t, np.nan))
            curve[np.isnan(curve)] = math.inf
    numbers = sorted(curves)
    return numbers, np.stack([curves[number] for number in numbers])


def _full_size(units: Mapping[str, Unit]) -> Iterator[tuple[int, Unit, dict[int, int | None]]]:
    """Yield units that trained a full-size trial: its number, and the workers of each epoch, None if none are told."""
    for key, unit in units.items():
        if (name := _TARGET_UNIT.fullmatch(key)) and (epochs := [*_metrics(unit.lines, "target")]):
            yield int(name[1]), unit, {line["epoch"]: line.get("workers") for line in epochs}


def _metrics(lines: Iterable[Line], stage: str) -> Iterator[Line]:
    return (line for line in lines if line["event"] == "metrics" and line["stage"] == stage)


def _stretches(units: Mapping[str, Unit]) -> dict[Stretch, dict[int, float]]:
    """By stretch and trial, the seconds of an epoch as one worker would have taken them."""
    found: dict[Stretch, dict[int, float]] = {}
    for trial, unit, told in _full_size(units):
        workers = [count or 1 for count in told.values()]
        seconds = max(unit.seconds, _RESOLUTION) / sum(1 / count for count in workers)
        found.setdefault(Stretch(min(workers), min(told), max(told)), {})[trial] = seconds
    return found


def _resizes(units: Mapping[str, Unit]) -> list[float]:
    """Seconds that full-size trials did not train between a unit and the next one, where their workers changed."""
    gaps: list[float] = []
    before: dict[int, tuple[int, float]] = {}
    for trial, unit, told in _full_size(units):
        if (workers := [*told.values()][-1]) is not None:
            had, until = before.get(trial, (workers, 0.0))
            if had != workers:
                gaps.append(max(0.0, unit.at - unit.seconds - until))
            before[trial] = workers, unit.at
    return gaps


def _sweep(units: Mapping[str, Unit]) -> Sweep | None:
    """Return the cost of the groups of surrogates."""
    longest: dict[int, float] = {}
    total = 0.0
    for key, unit in units.items():
        if name := _SWEEP_UNIT.fullmatch(key):
            total += unit.seconds
            longest[int(name[1])] = max(longest.get(int(name[1]), 0.0), unit.seconds)
    epochs = [line["trial"] for unit in units.values() for line in _metrics(unit.lines, "surrogate")]
    return Sweep(len(set(epochs)), total, sum(longest.values()), len(epochs)) if total else None


def _steps(train_data: str, lines: Iterable[Line]) -> float | None:
    """Steps of an epoch, given data that are described as "tensors (256, 8) float32, ..." or "MyDataset of 256"."""
    length = re.match(r"tensors \((\d+)", train_data) or re.search(r" of (\d+)$", train_data)
    sizes = [_batch_size(line["config"]) for line in lines if line["event"] == "trial"]
    return max(1.0, int(length[1]) / median(sizes)) if length and sizes else None


def _batch_size(config: Mapping[str, Any]) -> int:
    if "batch_size" in config:
        return int(config["batch_size"])
    from fusion.hyperparameters import read  # here, as it waits for torch

    return int(read(config, "batch_size"))


def _size(text: str) -> tuple[int, int]:
    """Number of elements of "(64, 32) torch.float32", and bytes of each."""
    shape, _, dtype = text.rpartition(" ")
    return math.prod(int(n) for n in re.findall(r"\d+", shape)), BYTES_PER_PARAMETER.get(dtype, 4)
