"""Trials of a Ray Tune experiment that wait: for workers, for their cohort at a milestone, for what they are granted.

Ray asks its scheduler in every turn of its loop, many times a second, whatever trials do: none waits for another beyond
its bound.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from statistics import median
from typing import Any

from ray.tune.experiment import Trial

from hydro_rasda.backends.ray.report_journal import JournalEntry
from hydro_rasda.schedulers import RASDA, Growth, MilestoneBarrier
from hydro_rasda.training.worker_reports import EPOCH_SECONDS, NOISE_SCALE, SCALING_EFFICIENCY, noise_in_workers


class WaitingQueue:
    """The trials of an experiment that wait, in order of arrival, and the clock of those that hold workers.

    The cost of a decision does not grow with the number of paused trials: of those that are alike, only the first to
    come is looked at. Trials are alike if `kind_of` them is: the milestones survived by the checkpoint that they would
    go on from, and the workers that they are due.
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
        """Return the place of the trial, or its place before it was given workers; None once it is over."""
        return self._places.get(trial.trial_id)

    def start(self, trial: Trial, rung: int) -> None:
        self._arriving.pop(trial.trial_id, None)
        self._holding[trial.trial_id] = trial
        self._started[trial.trial_id] = (time.monotonic(), rung)

    def leave(self, trial: Trial) -> None:
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
        return len(self._places) - len(self._holding)

    def usual_seconds(self, rung: int) -> float:
        """Median time that trials of a rung held their workers; inf before the first gave them back."""
        took = self._took[rung]
        middle = len(took) // 2
        return (took[middle] + took[~middle]) / 2 if took else math.inf

    def expected_back(self, trials: Iterable[Trial], rungs: Mapping[str, int], now: float) -> list[float]:
        """When trials give their workers back, if they keep them as long as trials of their rungs usually do.

        `now` counts as the start of those that Ray started by itself.
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


Undecided = tuple[Trial, JournalEntry]
"""A trial that waits, and the report with which it came."""


class Cohort:
    """The trials on the way to each milestone, those that wait there, and those to be stopped."""

    def __init__(self, wait: float) -> None:
        self._gathering = MilestoneBarrier(wait)
        self._undecided: dict[str, Undecided] = {}
        self._stopping: dict[str, Trial] = {}

    def begin(self, trial: Trial, milestone: int) -> None:
        self._gathering.begin(trial.trial_id, milestone, time.monotonic())

    def come(self, trial: Trial, milestone: int, score: float, report: JournalEntry) -> None:
        self._undecided[trial.trial_id] = trial, report
        self._gathering.come(trial.trial_id, milestone, score, time.monotonic())

    def leave(self, trial: Trial) -> None:
        """A trial is over, or failed and may begin again."""
        self._gathering.leave(trial.trial_id)
        self._undecided.pop(trial.trial_id, None)
        self._stopping.pop(trial.trial_id, None)

    def take(self) -> dict[int, tuple[Mapping[str, float], Mapping[str, Undecided]]]:
        """By milestone, the scores of the trials that are to be decided now, and these trials; they wait no longer."""
        taken = self._gathering.take(time.monotonic())
        return {m: (scores, {name: self._undecided.pop(name) for name in scores}) for m, scores in taken.items()}

    def stop(self, trial: Trial) -> None:
        """Has a trial that waited stopped, once it has saved its checkpoint."""
        self._stopping[trial.trial_id] = trial

    def saving(self) -> list[Trial]:
        """Trials that wait or are to stop, and hold their workers until they have saved their checkpoint."""
        trials = [*(trial for trial, _ in self._undecided.values()), *self._stopping.values()]
        return [trial for trial in trials if trial.status == Trial.RUNNING]

    def end_stopped(self, controller: Any) -> None:
        for trial in [t for t in self._stopping.values() if t.status in (Trial.PAUSED, Trial.PENDING)]:
            del self._stopping[trial.trial_id]
            controller.stop_trial(trial)


class Grants:
    """Workers that survivors were granted, if the rule does not simply grant what they are due."""

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

        Each survivor comes with the workers that it has, or had until it paused; `free` are slots that no other trial
        has.
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
