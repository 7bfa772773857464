"""Trials of Ray Tune that wait at a milestone for their fellows: `Gathering` on Ray's trials and the wall clock.

Ray asks its scheduler in every turn of its loop, many times a second, whatever trials do: none waits for another beyond
its bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Trial

from hydro_rasda.backends.ray.journal import JournalEntry
from hydro_rasda.schedulers import Gathering


@dataclass(frozen=True)
class Undecided:
    """A trial that waits, and the report with which it came."""

    trial: Trial
    report: JournalEntry


class Fellows:
    """Who is on the way to which milestone, who waits there, and who is to be stopped.

    Args:
        wait: See `Gathering`.
    """

    def __init__(self, wait: float) -> None:
        self._gathering = Gathering(wait)
        self._undecided: dict[str, Undecided] = {}
        self._stopping: dict[str, Trial] = {}

    def begin(self, trial: Trial, milestone: int) -> None:
        """A trial is on its way to a milestone from now on."""
        self._gathering.begin(trial.trial_id, milestone, time.monotonic())

    def come(self, trial: Trial, milestone: int, score: float, report: JournalEntry) -> None:
        """A trial waits at a milestone."""
        self._undecided[trial.trial_id] = Undecided(trial, report)
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
        trials = [entry.trial for entry in self._undecided.values()] + list(self._stopping.values())
        return [trial for trial in trials if trial.status == Trial.RUNNING]

    def end_stopped(self, controller: Any) -> None:
        """Stops those that are to stop and have saved.

        Args:
            controller: As Ray hands it to a scheduler.
        """
        for trial in [t for t in self._stopping.values() if t.status in (Trial.PAUSED, Trial.PENDING)]:
            del self._stopping[trial.trial_id]
            controller.stop_trial(trial)
