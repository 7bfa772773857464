"""Estimates of jobs, corrected by measurements of jobs of the same kind, and kept for the next call of `pack`.

A correction is the ratio of the measured to the given value. So estimates that differ within a kind, for example
because of batch sizes, keep their proportions. Jobs of a kind without given values are assumed to be alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydro_rasda.packing.devices import Device
from hydro_rasda.packing.tasks import Estimate, Task
from hydro_rasda.run.cache import is_positive, recall, remember
from hydro_rasda.schedulers.packing_policy import GUESS, MARGIN, Job

_FIELDS = ("memory", "share", "seconds")


class _Ratios:
    """Ratios, one for each job: its measured value over the value given for it, or over 1 if none was given.

    `highest` is the largest ratio so far; None without a ratio.
    """

    def __init__(self) -> None:
        self.highest: float | None = None
        self._of: dict[str, float] = {}
        self._sum = 0.0

    def add(self, name: str, ratio: float) -> None:
        """Record the ratio of the measured to the given value of the job `name`.

        In `mean`, it replaces the job's earlier ratio. `highest` never falls.
        """
        self.highest = max(ratio, self.highest or 0.0)
        self._sum += ratio - self._of.get(name, 0.0)
        self._of[name] = ratio

    @property
    def mean(self) -> float | None:
        """The mean over all jobs of the ratio of measured to given value; None without a job."""
        return self._sum / len(self._of) if self._of else None


class Estimates:
    """Estimates of the needs of jobs, corrected by measurements while jobs run.

    `before` has corrections from earlier calls, for kinds of jobs that are not measured yet.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self._measured: defaultdict[tuple[str, str, bool], _Ratios] = defaultdict(_Ratios)
        self._largest: dict[str, float] = {}
        self._before = dict(before or {})

    def keep(self, key: str) -> None:
        """Store the corrections under `key` in the cache, for later calls of `pack`."""
        remember(key, {"estimates": self.learnt()})

    def learnt(self) -> dict[str, float]:
        """Map job kinds and fields to corrections: measured over given values; if none were given, measured values."""
        own = {_key(*key): _of(ratios, key[1]) for key, ratios in self._measured.items()}
        return {**self._before, **{key: ratio for key, ratio in own.items() if ratio is not None}}

    def learn(self, task: Task, measured: Estimate) -> None:
        """Correct the estimates by the measured needs of a job.

        In a mean over jobs, they replace earlier measurements of the same job. The highest ratio of a kind never falls.
        """
        for name in _FIELDS:
            value = getattr(measured, name)
            if value is not None:
                given = getattr(task.estimate, name)
                self._largest[name] = max(value, self._largest.get(name, 0.0))
                self._of(task, name).add(task.name, value / (given or 1.0))

    def of(self, task: Task) -> Job | None:
        """Return the expected needs of a job; None if its memory or share is unknown and cannot be guessed."""
        memory, share, seconds = (self._expected(task, name) for name in _FIELDS)
        if memory is None or share is None:
            return None
        return Job(task.name, memory, share, seconds or 0.0, task.kind)

    def _expected(self, task: Task, name: str) -> float | None:
        given: float | None = getattr(task.estimate, name)
        ratio = _of(self._of(task, name), name)
        if ratio is None:
            ratio = self._before.get(_key(task.kind, name, given is None))
        if ratio is not None:
            return ratio * (given or 1.0) * (1.0 if name == "seconds" else MARGIN)
        if given is not None or name not in self._largest:
            return given
        return self._largest[name] * (GUESS if name == "memory" else 1.0)

    def _of(self, task: Task, name: str) -> _Ratios:
        return self._measured[task.kind, name, getattr(task.estimate, name) is None]


def _of(ratios: _Ratios, name: str) -> float | None:
    # For memory and share, the highest ratio of the kind counts. On a crowded device, a job gets a smaller share than
    # it needs, so a mean over jobs would be too low.
    return ratios.mean if name == "seconds" else ratios.highest


def _key(kind: str, name: str, alone: bool) -> str:
    return f"{name} {'' if alone else 'over given '}of {kind}"


def cache_key(devices: Sequence[Device]) -> str:
    """Return the cache key for the estimates of jobs that start from this folder, on GPUs or on CPUs."""
    where = "GPUs" if any(device.gpu for device in devices) else "CPUs"
    return f"packed on {where} from {Path.cwd()}"


def recall_estimates(key: str) -> Estimates:
    """Return the estimates that earlier calls kept under a key in the last weeks, without invalid entries."""
    kept = (recall(key) or {}).get("estimates")
    items = kept.items() if isinstance(kept, Mapping) else ()
    return Estimates({name: float(value) for name, value in items if is_positive(value)})
