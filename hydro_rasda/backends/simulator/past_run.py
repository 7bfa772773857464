"""A user's own past run as a workload: its journal says how trials learn and what an epoch takes.

Read only: the journal of a run that is still going on may be read too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from fusion.keys import read

from .workload import Floats, Workload

BYTES_PER_PARAMETER = {"torch.float64": 8, "torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}

# Older runs say "from" where they trained here, and "epoch" where on Ray.
_TARGET_UNIT = re.compile(r"target/trial-(\d+)/(?:to|from|epoch)-\d+")


@dataclass(frozen=True)
class PastRun:
    """What a run directory tells about a search space.

    Attributes:
        workload: All its trials, in the order of their numbers; ``work`` is known of those that trained at full size
            and 1 of the others.
        epoch_seconds: Median time of a full-size epoch on one device of that run; None where none was trained.
        parameters: Of the full-size model.
        gradient_bytes: Of the full-size model.
        steps: Of an epoch, at the trials' median batch size; None where the data tell no length.
        settings: What the run was asked (``run.json``).
    """

    workload: Workload
    epoch_seconds: float | None
    parameters: int
    gradient_bytes: int
    steps: float | None
    settings: Mapping[str, Any]


def read_past_run(folder: str | Path) -> PastRun:
    """Reads ``run.json`` and ``journal.jsonl`` of a run directory.

    Trials are compared by their surrogates, of which there are most; by full-size models where there are no surrogates.
    A trial that was stopped early has no later epochs: from there on it takes the mean step of the trials that do, and
    none where no trial does, so that those that were stopped together keep their order. A trial that failed has NaN.

    Args:
        folder: ``storage_path/name`` of the run.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: the run has no metrics yet.
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
    seconds = _epoch_seconds(lines)
    typical = median(seconds.values()) if seconds else None
    work = np.array([seconds[n] / typical if typical and n in seconds else 1.0 for n in numbers])
    sizes = [_size(text) for text in settings["model"].values()]
    return PastRun(
        workload=Workload(continued(scores), work, settings["mode"]),
        epoch_seconds=typical,
        parameters=sum(count for count, _ in sizes),
        gradient_bytes=sum(count * width for count, width in sizes),
        steps=_steps(settings["train_data"], lines),
        settings=settings,
    )


def continued(scores: Floats) -> Floats:
    """Fills in the epochs that a trial did not train, each with the mean step of the trials that trained it.

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
    """Whole lines; the last may be in the writing."""
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


def _epoch_seconds(lines: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds of a full-size epoch on one device, by trial.

    Of a trial that grew, the epochs on the fewest workers tell, times their number: more of them waste more.
    """
    taken: dict[int, dict[int, list[float]]] = {}
    pending: list[int] = []
    for line in lines:
        if line["event"] == "metrics" and line["stage"] == "target":
            pending.append(line.get("workers", 1))
        elif line["event"] == "unit":
            unit = _TARGET_UNIT.fullmatch(line["key"])
            if unit and pending:
                seconds = [line["seconds"] / len(pending) * workers for workers in pending]
                taken.setdefault(int(unit[1]), {}).setdefault(min(pending), []).extend(seconds)
            pending = []
    return {number: mean(by_workers[min(by_workers)]) for number, by_workers in taken.items()}


def _steps(train_data: str, lines: Iterable[Mapping[str, Any]]) -> float | None:
    """Steps of an epoch over "tensors (256, 8) float32, ..." or "MyDataset of 256"."""
    length = re.match(r"tensors \((\d+)", train_data) or re.search(r" of (\d+)$", train_data)
    sizes = [read(line["config"], "batch_size") for line in lines if line["event"] == "trial"]
    return max(1.0, int(length[1]) / median(sizes)) if length and sizes else None


def _size(text: str) -> tuple[int, int]:
    """Elements and bytes an element of "(64, 32) torch.float32"."""
    shape, _, dtype = text.rpartition(" ")
    return math.prod(int(n) for n in re.findall(r"\d+", shape)), BYTES_PER_PARAMETER.get(dtype, 4)
