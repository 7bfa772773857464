"""Who waits for workers since when, and how long those that hold some usually keep them."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from statistics import median

from ray.tune.experiment import Trial


class Line:
    """The trials of an experiment that wait, in order of arrival, and the clock of those that run."""

    def __init__(self) -> None:
        self.overtaken = 0
        self._places: dict[str, int] = {}
        self._started: dict[str, tuple[float, int]] = {}
        self._took: defaultdict[int, list[float]] = defaultdict(list)
        self._count = 0

    def join(self, trial: Trial, place: int | None = None) -> None:
        """The trial gives its workers back and waits from now on, in a place that it had before or in the last."""
        self._release(trial)
        self._count += 1
        self._places[trial.trial_id] = self._count if place is None else place

    def place(self, trial: Trial) -> int | None:
        """Where the trial stands, or stood before it was given workers; None once it is over."""
        return self._places.get(trial.trial_id)

    def start(self, trial: Trial, rung: int) -> None:
        """The trial holds workers from now on."""
        self._started[trial.trial_id] = (time.monotonic(), rung)

    def started(self, trial: Trial) -> bool:
        """Whether the trial was given workers and has not given them back."""
        return trial.trial_id in self._started

    def leave(self, trial: Trial) -> None:
        """The trial is over."""
        self._release(trial)
        self._places.pop(trial.trial_id, None)

    def waiting(self, live: list[Trial]) -> list[Trial]:
        """Those of ``live`` that wait, in order of arrival. One that still saves its checkpoint does not wait yet."""
        idle = [t for t in live if t.trial_id in self._places and not self.started(t)]
        able = [t for t in idle if t.status in (Trial.PENDING, Trial.PAUSED)]
        return sorted(able, key=lambda t: self._places[t.trial_id])

    def usual_seconds(self, rung: int) -> float:
        """Median time that trials of a rung held their workers; inf before the first gave them back."""
        return median(self._took[rung]) if self._took[rung] else math.inf

    def seconds_left(self, trial: Trial, rung: int) -> float:
        """Time until the trial gives its workers back, if it takes as long as usual."""
        since, _ = self._started.get(trial.trial_id, (time.monotonic(), rung))
        return max(0.0, self.usual_seconds(rung) - (time.monotonic() - since))

    def _release(self, trial: Trial) -> None:
        since, rung = self._started.pop(trial.trial_id, (None, 0))
        if since is not None:
            self._took[rung].append(time.monotonic() - since)
