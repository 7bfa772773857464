"""Who waits for workers since when, who holds some, and how long those usually keep them."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush

from ray.tune.experiment import Trial


class WaitingQueue:
    """The trials of an experiment that wait, in order of arrival, and the clock of those that hold workers.

    What a decision costs does not grow with the number of paused trials: of those that are alike, only the first to
    come is looked at.

    Args:
        kind_of: The milestones that a trial survived, by the checkpoint that it would go on from, and the workers that
            it is due; who has both in common is alike.
    """

    def __init__(self, kind_of: Callable[[Trial], tuple[int, int]]) -> None:
        self.overtaken = 0
        self._kind_of = kind_of
        self._places: dict[str, int] = {}
        self._arriving: dict[str, Trial] = {}  # new, or still saving the checkpoint that it is to go on from
        self._paused: defaultdict[tuple[int, int], list[tuple[int, str, Trial]]] = defaultdict(list)  # heaps, by kind
        self._holding: dict[str, Trial] = {}
        self._started: dict[str, tuple[float, int]] = {}
        self._took: defaultdict[int, list[float]] = defaultdict(list)  # by rung, rising
        self._count = 0

    def join(self, trial: Trial, place: int | None = None) -> None:
        """The trial gives its workers back and waits from now on, in a place that it had before or in the last."""
        self._release(trial)
        self._count += 1
        self._places[trial.trial_id] = self._count if place is None else place
        self._arriving[trial.trial_id] = trial

    def place(self, trial: Trial) -> int | None:
        """Where the trial stands, or stood before it was given workers; None once it is over."""
        return self._places.get(trial.trial_id)

    def start(self, trial: Trial, rung: int) -> None:
        """The trial holds workers from now on."""
        self._arriving.pop(trial.trial_id, None)
        self._holding[trial.trial_id] = trial
        self._started[trial.trial_id] = (time.monotonic(), rung)

    def leave(self, trial: Trial) -> None:
        """The trial is over."""
        self._release(trial)
        self._arriving.pop(trial.trial_id, None)
        self._places.pop(trial.trial_id, None)

    def given(self) -> list[Trial]:
        """Trials that were given workers and have not given them back, whether or not Ray has started them yet."""
        return list(self._holding.values())

    def holding(self) -> list[Trial]:
        """Trials that hold workers: also those that still save a checkpoint, and those that Ray started by itself."""
        given = [t for t in self._holding.values() if t.status in (Trial.PENDING, Trial.RUNNING)]
        return given + [trial for trial in self._arriving.values() if trial.status == Trial.RUNNING]

    def waiting(self) -> list[Trial]:
        """Trials that could be next, in order of arrival: all new ones, and of the others the first of each kind."""
        for trial in [trial for trial in self._arriving.values() if trial.status == Trial.PAUSED]:
            del self._arriving[trial.trial_id]
            heappush(self._paused[self._kind_of(trial)], (self._places[trial.trial_id], trial.trial_id, trial))
        new = [trial for trial in self._arriving.values() if trial.status == Trial.PENDING]
        firsts = [first for heap in self._paused.values() if (first := self._first(heap)) is not None]
        return sorted(new + firsts, key=lambda trial: self._places[trial.trial_id])

    def idle(self) -> int:
        """How many trials wait."""
        return len(self._places) - len(self._holding)

    def usual_seconds(self, rung: int) -> float:
        """Median time that trials of a rung held their workers; inf before the first gave them back."""
        took = self._took[rung]
        middle = len(took) // 2
        return (took[middle] + took[~middle]) / 2 if took else math.inf

    def expected_back(self, trials: Iterable[Trial], rungs: Mapping[str, int], now: float) -> list[float]:
        """When trials give their workers back, if they keep them as long as trials of their rungs usually do.

        Args:
            trials: They hold workers.
            rungs: By trial, the milestones that it survived; 0 where it is not named.
            now: The time, which counts as the start of those that Ray started by itself.
        """
        usual: dict[int, float] = {}
        found = []
        for name in (trial.trial_id for trial in trials):
            rung = rungs.get(name, 0)
            if rung not in usual:
                usual[rung] = self.usual_seconds(rung)
            since, _ = self._started.get(name, (now, rung))
            found.append(since + usual[rung])
        return found

    def _first(self, heap: list[tuple[int, str, Trial]]) -> Trial | None:
        """The first trial of a kind that still waits; those before it are dropped, for they started or are over."""
        while heap:
            place, name, trial = heap[0]
            if self._places.get(name) == place and name not in self._holding and trial.status == Trial.PAUSED:
                return trial
            heappop(heap)
        return None

    def _release(self, trial: Trial) -> None:
        self._holding.pop(trial.trial_id, None)
        since, rung = self._started.pop(trial.trial_id, (None, 0))
        if since is not None:
            insort(self._took[rung], time.monotonic() - since)
