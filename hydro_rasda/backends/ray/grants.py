"""With how many workers the survivors of an experiment go on, by what their reports tell of their growth so far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ray.tune.experiment import Trial

from hydro_rasda.schedulers import RASDA, Growth
from hydro_rasda.training.measured import EPOCH_SECONDS, NOISE_SCALE, SCALING_EFFICIENCY, noise_in_workers


class Grants:
    """What survivors were granted where they do not simply get what they are due.

    Args:
        rule: Decides.
    """

    def __init__(self, rule: RASDA) -> None:
        self._rule = rule
        self._granted: dict[str, int] = {}
        self._seconds: dict[str, defaultdict[int, list[float]]] = {}
        self._efficiency: dict[str, float | None] = {}
        self._noise_scale: dict[str, float] = {}

    def note(self, trial: Trial, workers: int, result: Mapping[str, Any]) -> None:
        """Takes in a report of a trial that trains with so many workers."""
        # Ray's own time also holds the start of the workers, where it is the first since.
        later = result.get("iterations_since_restore", 1) > 1
        seconds = result.get(EPOCH_SECONDS, result.get("time_this_iter_s") if later else None)
        if seconds is not None:
            self._seconds.setdefault(trial.trial_id, defaultdict(list))[workers].append(float(seconds))
        self._efficiency[trial.trial_id] = result.get(SCALING_EFFICIENCY)
        if result.get(NOISE_SCALE) is not None:
            self._noise_scale[trial.trial_id] = noise_in_workers(result, workers)

    def give(self, survivors: Sequence[tuple[Trial, int]], milestone: int, slots: int, free: int, idle: int) -> None:
        """Settles with how many workers trials go on that survived a milestone together.

        Args:
            survivors: Each with the workers that it has, or had until it paused.
            milestone: Which they survived.
            slots: Workers that the cluster holds.
            free: Of these, those that no other trial has.
            idle: Other trials that wait for workers.
        """
        for trial, held in survivors:
            seconds: Mapping[int, list[float]] = self._seconds.get(trial.trial_id, {})
            growth = Growth(
                held=held,
                due=self._rule.workers_at(milestone),
                base=self._rule.workers,
                alive=len(survivors) + idle,
                capacity=slots,
                seconds={},
                free=free,
                sharing=len(survivors) + idle,
                own={workers: median(taken) for workers, taken in seconds.items()},
                efficiency=self._efficiency.get(trial.trial_id),
                noise_scale=self._noise_scale.get(trial.trial_id, math.inf),
            )
            self._granted[trial.trial_id] = self._rule.resize(growth)

    def of(self, trial: Trial) -> int:
        """Workers that a trial is to go on with: granted here, or had before this process; else a new trial's."""
        latest = trial.latest_checkpoint_result
        had = latest.metrics.get("workers") if latest else None
        return self._granted.get(trial.trial_id, self._rule.workers if had is None else int(had))
