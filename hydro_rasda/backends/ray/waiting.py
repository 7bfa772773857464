"""Trials of a Ray Tune experiment that wait for workers or for their cohort, and the workers that they are granted.

A trial waits at a milestone for its cohort: trials that will soon reach the same milestone; see `MilestoneBarrier`. Ray
asks its scheduler many times a second, in every turn of its loop, even if no trial reports. So waits end on time.
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

from hydro_rasda.backends.ray.report_journal import JournalEntry, as_float
from hydro_rasda.schedulers import RASDA, Growth, MilestoneBarrier
from hydro_rasda.settings.config import GLOBAL_BATCH, NOISE_SCALE, SCALING_EFFICIENCY
from hydro_rasda.training.worker_reports import EPOCH_SECONDS, noise_in_workers


class WaitingQueue:
    """The waiting trials of an experiment, in order of arrival, and the times for which trials hold workers.

    The cost of a decision does not grow with the number of paused trials, because only the first trial of each kind is
    looked at. `kind_of(trial)` is the number of milestones that the trial's checkpoint survived, and the number of
    workers that the trial is due.
    """

    def __init__(self, kind_of: Callable[[Trial], tuple[int, int]]) -> None:
        self.overtaken = 0
        self._kind_of = kind_of
        self._places: dict[str, int] = {}
        self._arriving: dict[str, Trial] = {}  # new trials, and those that still save a checkpoint before they pause
        self._paused: defaultdict[tuple[int, int], list[tuple[int, str, Trial]]] = defaultdict(list)  # heaps by kind
        self._holding: dict[str, Trial] = {}
        self._started: dict[str, tuple[float, int]] = {}
        self._took: defaultdict[int, list[float]] = defaultdict(list)  # by rung: seconds of holding workers, sorted
        self._count = 0

    def join(self, trial: Trial, place: int | None = None) -> None:
        """Let a trial give its workers back, and wait at the place `place` in the queue; None is the last place."""
        self._release(trial)
        self._count += 1
        self._places[trial.trial_id] = self._count if place is None else place
        self._arriving[trial.trial_id] = trial

    def place(self, trial: Trial) -> int | None:
        """Return the place of a trial that waits, or that it had before it got workers; None once the trial is over."""
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
        """Return the trials that have been given workers, even if Ray has not started them yet."""
        return list(self._holding.values())

    def holding(self) -> list[Trial]:
        """Return the trials that hold workers, also those that save a checkpoint or that Ray started by itself."""
        given = [t for t in self._holding.values() if t.status in (Trial.PENDING, Trial.RUNNING)]
        return given + [trial for trial in self._arriving.values() if trial.status == Trial.RUNNING]

    def waiting(self) -> list[Trial]:
        """Return the trials that may be next, in order of arrival: all new trials, and each kind's first paused one."""
        for trial in [trial for trial in self._arriving.values() if trial.status == Trial.PAUSED]:
            del self._arriving[trial.trial_id]
            heappush(self._paused[self._kind_of(trial)], (self._places[trial.trial_id], trial.trial_id, trial))
        new = [trial for trial in self._arriving.values() if trial.status == Trial.PENDING]
        firsts = [first for heap in self._paused.values() if (first := self._first(heap)) is not None]
        return sorted(new + firsts, key=lambda trial: self._places[trial.trial_id])

    def idle(self) -> int:
        return len(self._places) - len(self._holding)

    def usual_seconds(self, rung: int) -> float:
        """Return the median time that trials of a rung held their workers; inf until one has given them back."""
        took = self._took[rung]
        middle = len(took) // 2
        return (took[middle] + took[~middle]) / 2 if took else math.inf

    def expected_back(self, trials: Iterable[Trial], rungs: Mapping[str, int], now: float) -> list[float]:
        """Return when trials will give their workers back, if they hold them for the usual time of their rungs.

        For trials that Ray started by itself, `now` counts as their start.
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
        """Return the first trial of a kind that still waits; remove those before it, which started or are over."""
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
"""A waiting trial, and the report with which it reached its milestone."""


class Cohort:
    """The trials that train to each milestone, those that wait there for others, and those that are to be stopped."""

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
        """Remove from its cohort a trial that is over, or that failed and may begin again."""
        self._gathering.leave(trial.trial_id)
        self._undecided.pop(trial.trial_id, None)
        self._stopping.pop(trial.trial_id, None)

    def take(self) -> dict[int, tuple[Mapping[str, float], Mapping[str, Undecided]]]:
        """Remove the trials that are decided now; return their scores and reports by milestone."""
        taken = self._gathering.take(time.monotonic())
        return {m: (scores, {name: self._undecided.pop(name) for name in scores}) for m, scores in taken.items()}

    def stop(self, trial: Trial) -> None:
        """Let a waiting trial be stopped, once it has saved its checkpoint."""
        self._stopping[trial.trial_id] = trial

    def saving(self) -> list[Trial]:
        """Return trials that wait or are to stop, but hold their workers until they have saved a checkpoint."""
        trials = [*(trial for trial, _ in self._undecided.values()), *self._stopping.values()]
        return [trial for trial in trials if trial.status == Trial.RUNNING]

    def end_stopped(self, end: Callable[[Trial], None]) -> None:
        for trial in [t for t in self._stopping.values() if t.status in (Trial.PAUSED, Trial.PENDING)]:
            del self._stopping[trial.trial_id]
            end(trial)


class Grants:
    """The workers that the rule grants to survivors. With `grow="efficient"`, these may be fewer than are due."""

    def __init__(self, rule: RASDA) -> None:
        self._rule = rule
        self._granted: dict[str, int] = {}
        self._seconds: dict[str, defaultdict[int, list[float]]] = {}
        self._efficiency: dict[str, float | None] = {}
        self._noise_scale: dict[str, float] = {}

    def note(self, trial: Trial, workers: int, result: Mapping[str, Any]) -> None:
        """Record times, efficiency and noise scale from a trial's report `result`; the trial has `workers` workers."""
        # Skip Ray's time of the first iteration after a start, because it includes the start of the workers.
        later = result.get("iterations_since_restore", 1) > 1
        names = EPOCH_SECONDS, SCALING_EFFICIENCY, NOISE_SCALE, GLOBAL_BATCH, "time_this_iter_s"
        found = {name: as_float(result.get(name)) for name in names}  # a script may use such a name for a text
        seconds = found[EPOCH_SECONDS]
        if seconds is None and later:
            seconds = found["time_this_iter_s"]
        if seconds is not None:
            self._seconds.setdefault(trial.trial_id, defaultdict(list))[workers].append(seconds)
        self._efficiency[trial.trial_id] = found[SCALING_EFFICIENCY]
        if found[NOISE_SCALE] is not None:
            self._noise_scale[trial.trial_id] = noise_in_workers(found, workers)

    def give(self, survivors: Sequence[tuple[Trial, int]], milestone: int, slots: int, free: int, idle: int) -> None:
        """Decide the number of workers of trials that survived a milestone together.

        Each survivor comes with the workers that it has, or had until it paused. The cluster holds `slots` workers, of
        which other trials leave `free`. `idle` is the number of trials that wait.
        """
        for trial, held in survivors:
            seconds: Mapping[int, list[float]] = self._seconds.get(trial.trial_id, {})
            # A trial that passed several milestones in one report is decided at the earlier ones later.
            least = min(held, self._rule.max_workers or held)
            growth = Growth(
                held=held,
                due=max(self._rule.workers_at(milestone), least),
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
        """Return the workers with which a trial continues: those granted, else its former ones, else a new trial's."""
        latest = trial.latest_checkpoint_result
        had = latest.metrics.get("workers") if latest else None
        return self._granted.get(trial.trial_id, self._rule.workers if had is None else int(had))
