"""Measurements of a past run, of any tool: how trials learn, and how long an epoch takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any, NamedTuple

import numpy as np

from hydro_rasda.simulator.workload import Floats, Workload


class Sweep(NamedTuple):
    """Cost of the surrogates, on the devices of the past run.

    Attributes:
        device_seconds: Device time of all groups together.
        longest: Seconds that the slowest groups of all rungs take, one rung after the other: no number of devices makes
            a sweep shorter.
    """

    trials: int
    device_seconds: float
    longest: float
    epochs: int


@dataclass(frozen=True)
class PastRun:
    """Measurements of a past run.

    Attributes:
        workload: All trials of the run, in their order there. `work` is measured by comparison with those that trained
            the same epochs, and 1 for trials that have no such epoch (at full size, of a run of this library's).
        epoch_seconds: Median time of a full-size epoch on one device of that run, of a trial whose `work` is 1; None
            where none was timed.
        restart_seconds: From a resize to the first step after it, as the run's own resizes took; None where it had
            none.
        resizes: How many these were.
        parameters: Number of parameters of the full-size model; None where the run does not tell.
        gradient_bytes: Size of its gradients; 0 likewise.
        steps: Steps of an epoch at the trials' median batch size; None where the run does not tell how much data it
            had.
        sweep: Cost of its surrogates; None if it had none.
        finalists: The trials that it trained at full size after that, as a workload; None where it trained none.
        settings: The settings of the run (`run.json`); empty of a run that this library did not make.
    """

    workload: Workload
    epoch_seconds: float | None = None
    restart_seconds: float | None = None
    resizes: int = 0
    parameters: int | None = None
    gradient_bytes: int = 0
    steps: float | None = None
    sweep: Sweep | None = None
    finalists: Workload | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def continued(scores: Floats) -> Floats:
    """Fills in the scores of epochs that a trial did not train.

    From one epoch to the next, such a score changes by the average change of the trials that trained that epoch. It
    stays as it is if none did. So trials that were stopped together keep their order. Before a trial's first score, it
    has that.

    Args:
        scores: [N, T]; NaN where a trial did not train, inf (of any sign) where it failed or diverged.

    Returns:
        [N, T]; NaN where a trial failed or diverged, and nowhere else.

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
    """Epochs that trials trained at full size, each trial on the same number of workers."""

    workers: int
    first: int
    last: int


def costs(stretches: Mapping[Stretch, Mapping[int, float]]) -> tuple[float | None, dict[int, float]]:
    """Seconds of an epoch on one device, and the cost of each trial relative to them.

    How fast a machine is changes with what else runs on it, and with how many trials are left. A trial is therefore
    compared with those that trained the same epochs on as many workers, each of them in proportion to its cost so far.
    Epochs that it trained alone say nothing about its cost. Of several comparisons, the median counts. Seconds are the
    median of those on the fewest workers: the more workers, the more of their time is lost.

    Args:
        stretches: By stretch and trial, the seconds of an epoch as one worker would have taken them.
    """
    compared: dict[int, list[float]] = {}
    for _, seconds in sorted(stretches.items()):
        known = [taken / median_low(compared[n]) for n, taken in seconds.items() if n in compared]
        typical = median(known or seconds.values())
        for n, taken in seconds.items():
            compared.setdefault(n, []).append(taken / typical)
    relative = {n: median_low(ratios) for n, ratios in compared.items()}
    fewest = min((stretch.workers for stretch in stretches), default=1)
    each = [taken / relative[n] for s, of in stretches.items() if s.workers == fewest for n, taken in of.items()]
    return median(each) if each else None, relative


def restart_seconds(gaps: Sequence[float]) -> float | None:
    """Estimate the seconds of a restart from the gaps of a run between two sizes of a trial; None without gaps.

    A trial may have waited for workers in some of them, which is no part of a restart: a quarter were as short or
    shorter.
    """
    return sorted(gaps)[(len(gaps) - 1) // 4] if gaps else None
