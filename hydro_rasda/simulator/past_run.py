"""A past run as a workload: its journal tells how trials learn, and how long an epoch takes.

Nothing is written: a run that is still going on can be read, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

import numpy as np

from fusion.keys import read
from hydro_rasda.simulator.workload import Floats, Workload

BYTES_PER_PARAMETER = {"torch.float64": 8, "torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}

# Seconds to which a journal's times are rounded.
_RESOLUTION = 1e-4

# Older runs name units by "from" where the local backend trained them, and by "epoch" where Ray did.
_TARGET_UNIT = re.compile(r"target/trial-(\d+)/(?:to|from|epoch)-\d+")


@dataclass(frozen=True)
class PastRun:
    """What a past run tells about its search space.

    Attributes:
        workload: All trials of the run, in the order of their numbers. `work` is measured for those that trained at
            full size, by comparison with those that trained the same epochs, and 1 for the others.
        epoch_seconds: Median time of a full-size epoch on one device of that run, of a trial whose `work` is 1; None
            where none was trained.
        parameters: Number of parameters of the full-size model.
        gradient_bytes: Size of its gradients.
        steps: Steps of an epoch at the trials' median batch size; None where the run does not tell how much data it
            had.
        settings: The settings of the run (`run.json`).
    """

    workload: Workload
    epoch_seconds: float | None
    parameters: int
    gradient_bytes: int
    steps: float | None
    settings: Mapping[str, Any]


def read_past_run(folder: str | Path) -> PastRun:
    """Reads `run.json` and `journal.jsonl` in the folder of a run.

    The curves are those of the surrogates, since every trial has one; where a run has none, those of the full-size
    models. A trial that was stopped early has no scores for later epochs: these are filled in by `continued`. A trial
    that failed has NaN.

    Args:
        folder: `storage_path/name` of the run.

    Raises:
        FileNotFoundError: where the folder holds no run.
        ValueError: where the run has trained no epoch yet.
    """
    path = Path(folder)
    for name in ("run.json", "journal.jsonl"):
        if not (path / name).exists():
            raise FileNotFoundError(f"`run` is {str(folder)!r}, but must be a run's folder: it holds no {name}")
    settings = json.loads((path / "run.json").read_text())
    lines = list(_lines((path / "journal.jsonl").read_text(encoding="utf-8")))
    stages = {line["stage"] for line in lines if line["event"] == "metrics"}
    if not stages:
        raise ValueError(f"`run` is {str(folder)!r}, but must have trained at least one epoch: its journal has none")
    stage = "surrogate" if "surrogate" in stages else "target"
    numbers, scores = _curves(lines, stage, settings["metric"], int(settings["max_t"]))
    seconds, costs = _costs(_stretches(lines))
    work = np.array([costs.get(n, 1.0) for n in numbers])
    sizes = [_size(text) for text in settings["model"].values()]
    return PastRun(
        workload=Workload(continued(scores), work, settings["mode"]),
        epoch_seconds=seconds,
        parameters=sum(count for count, _ in sizes),
        gradient_bytes=sum(count * width for count, width in sizes),
        steps=_steps(settings["train_data"], lines),
        settings=settings,
    )


def continued(scores: Floats) -> Floats:
    """Fills in the scores of epochs that a trial did not train.

    From one epoch to the next, such a score changes by as much as the scores of the trials that trained that epoch do
    on average, and stays as it is where none did. So trials that were stopped together keep their order.

    Args:
        scores: [N, T]; NaN after a trial's last epoch, inf (of any sign) where it failed or diverged.

    Returns:
        [N, T]; NaN where a trial failed or diverged, and nowhere else.

    >>> continued(np.array([[5.0, 3.0, 2.0], [6.0, np.nan, np.nan]])).tolist()
    [[5.0, 3.0, 2.0], [6.0, 4.0, 3.0]]
    """
    filled = scores.copy()
    for t in range(1, scores.shape[1]):
        steps = scores[:, t] - np.where(np.isfinite(scores[:, t - 1]), scores[:, t - 1], np.nan)
        steps = steps[np.isfinite(steps)]
        mean = float(steps.mean()) if steps.size else 0.0
        filled[:, t] = np.where(np.isnan(scores[:, t]), filled[:, t - 1] + mean, scores[:, t])
    return np.where(np.isfinite(filled), filled, np.nan)


def _lines(text: str) -> Iterable[dict[str, Any]]:
    """All lines but the last where that is incomplete, since the run is writing it."""
    for raw in text.splitlines():
        try:
            yield json.loads(raw)
        except ValueError:
            return


def _curves(lines: Iterable[Mapping[str, Any]], stage: str, metric: str, max_t: int) -> tuple[list[int], Floats]:
    curves: dict[int, Floats] = {}
    for line in lines:
        if line["event"] == "trial":
            curves.setdefault(line["trial"], np.full(max_t, np.nan))
        elif line["event"] == "metrics" and line["stage"] == stage:
            curve = curves.setdefault(line["trial"], np.full(max_t, np.nan))
            value = line.get(metric)
            curve[line["epoch"] - 1] = math.inf if value is None else value
        elif line["event"] == "failed":
            curve = curves.setdefault(line["trial"], np.full(max_t, np.nan))
            curve[np.isnan(curve)] = math.inf
    numbers = sorted(number for number, curve in curves.items() if not np.isnan(curve).all())
    return numbers, np.stack([curves[number] for number in numbers])


class _Stretch(NamedTuple):
    """Epochs that trials trained at full size, each trial on the same number of workers."""

    workers: int
    first: int
    last: int


def _stretches(lines: Iterable[Mapping[str, Any]]) -> dict[_Stretch, dict[int, float]]:
    """By stretch and trial, the seconds of an epoch as one worker would have taken them."""
    found: dict[_Stretch, dict[int, float]] = {}
    pending: dict[int, int] = {}
    for line in lines:
        if line["event"] == "metrics" and line["stage"] == "target":
            pending[line["epoch"]] = line.get("workers", 1)
        elif line["event"] == "unit":
            unit = _TARGET_UNIT.fullmatch(line["key"])
            if unit and pending:
                stretch = _Stretch(min(pending.values()), min(pending), max(pending))
                seconds = max(line["seconds"], _RESOLUTION) / sum(1 / workers for workers in pending.values())
                found.setdefault(stretch, {})[int(unit[1])] = seconds
            pending = {}
    return dict(sorted(found.items()))


def _costs(stretches: Mapping[_Stretch, Mapping[int, float]]) -> tuple[float | None, dict[int, float]]:
    """Seconds of an epoch on one device, and the cost of each trial relative to them.

    How fast a machine is changes with what else runs on it, and with how many trials are left. A trial is therefore
    compared with those that trained the same epochs on as many workers, each of them in proportion to its cost so far;
    epochs that it trained alone say nothing about its cost. Of several comparisons, the median counts. Seconds are the
    median of those on the fewest workers: the more workers, the more of their time is lost.
    """
    compared: dict[int, list[float]] = {}
    for seconds in stretches.values():
        known = [taken / median_low(compared[n]) for n, taken in seconds.items() if n in compared]
        typical = median(known or seconds.values())
        for n, taken in seconds.items():
            compared.setdefault(n, []).append(taken / typical)
    costs = {n: median_low(ratios) for n, ratios in compared.items()}
    fewest = min((stretch.workers for stretch in stretches), default=1)
    each = [taken / costs[n] for s, of in stretches.items() if s.workers == fewest for n, taken in of.items()]
    return median(each) if each else None, costs


def _steps(train_data: str, lines: Iterable[Mapping[str, Any]]) -> float | None:
    """Steps of an epoch, given data that are described as "tensors (256, 8) float32, ..." or "MyDataset of 256"."""
    length = re.match(r"tensors \((\d+)", train_data) or re.search(r" of (\d+)$", train_data)
    sizes = [read(line["config"], "batch_size") for line in lines if line["event"] == "trial"]
    return max(1.0, int(length[1]) / median(sizes)) if length and sizes else None


def _size(text: str) -> tuple[int, int]:
    """Number of elements of "(64, 32) torch.float32", and bytes of each."""
    shape, _, dtype = text.rpartition(" ")
    return math.prod(int(n) for n in re.findall(r"\d+", shape)), BYTES_PER_PARAMETER.get(dtype, 4)
