"""Estimates, corrected by what jobs of a kind were measured to take. Pure: plain values in, plain values out.

A correction is a ratio of what was measured to what was given, so that estimates that differ within a kind, by batch
size, say, keep their proportions. Where nothing was given, jobs of a kind are taken to be alike.
"""

from __future__ import annotations

from collections import defaultdict

from hydro_rasda.packing.tasks import Estimate, Task
from hydro_rasda.schedulers import Job
from hydro_rasda.schedulers.packing import GUESS, MARGIN

_FIELDS = ("memory", "share", "seconds")


class _Ratios:
    """Of measured to given values.

    Attributes:
        highest: Of all so far; None where there is none.
    """

    def __init__(self) -> None:
        self.highest: float | None = None
        self._of: dict[str, float] = {}
        self._sum = 0.0

    def add(self, name: str, ratio: float) -> None:
        """One job's, in place of an earlier one of its own."""
        self.highest = max(ratio, self.highest or 0.0)
        self._sum += ratio - self._of.get(name, 0.0)
        self._of[name] = ratio

    @property
    def mean(self) -> float | None:
        """None where there is none."""
        return self._sum / len(self._of) if self._of else None


class Estimates:
    """What is known of jobs; corrected as they run."""

    def __init__(self) -> None:
        self._measured: defaultdict[tuple[str, str, bool], _Ratios] = defaultdict(_Ratios)
        self._largest: dict[str, float] = {}

    def learn(self, task: Task, measured: Estimate) -> None:
        """Take in what a job took; where it was measured before, this takes the place of that."""
        for name in _FIELDS:
            value = getattr(measured, name)
            if value is not None:
                given = getattr(task.estimate, name)
                self._largest[name] = max(value, self._largest.get(name, 0.0))
                self._of(task, name).add(task.name, value / (given or 1.0))

    def of(self, task: Task) -> Job | None:
        """What a job is expected to take; None where its memory or its share are not known, and cannot be guessed."""
        memory, share, seconds = (self._expected(task, name) for name in _FIELDS)
        if memory is None or share is None:
            return None
        return Job(task.name, memory, share, seconds or 0.0, task.kind)

    def _expected(self, task: Task, name: str) -> float | None:
        given: float | None = getattr(task.estimate, name)
        ratios = self._of(task, name)
        # Beside too many others, a job gets less of the device than it would take: the highest share is its own.
        ratio = ratios.mean if name == "seconds" else ratios.highest
        if ratio is not None:
            return ratio * (given or 1.0) * (1.0 if name == "seconds" else MARGIN)
        if given is not None or name not in self._largest:
            return given
        return self._largest[name] * (GUESS if name == "memory" else 1.0)

    def _of(self, task: Task, name: str) -> _Ratios:
        return self._measured[task.kind, name, getattr(task.estimate, name) is None]
