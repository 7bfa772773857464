"""Estimates of jobs, corrected by measurements of jobs of the same kind, and kept for the next call of `pack`.

A correction is the ratio of the measured to the given value. So estimates that differ within a kind, by batch size, for
example, keep their proportions. Jobs of a kind without given values are assumed to be alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydro_rasda.packing.devices import Device
from hydro_rasda.packing.tasks import Estimate, Task
from hydro_rasda.run.cache import is_positive, recall, remember
from hydro_rasda.schedulers import Interference, Job
from hydro_rasda.schedulers.packing_policy import GUESS, MARGIN

_FIELDS = ("memory", "share", "seconds")

_STEP, _SEEN = 0.3, 5.0
"""The share of a residual that is added to a term, and the number of neighbors after which a pair of kinds is known."""

MOST_SLOWER = 4.0
"""The largest factor by which a neighbor is assumed to slow others."""


class _Ratios:
    """Ratios of measured to given values, one a job; `highest` is the largest so far, None without a ratio."""

    def __init__(self) -> None:
        self.highest: float | None = None
        self._of: dict[str, float] = {}
        self._sum = 0.0

    def add(self, name: str, ratio: float) -> None:
        """Add the ratio of a job, in place of an earlier ratio of the same job."""
        self.highest = max(ratio, self.highest or 0.0)
        self._sum += ratio - self._of.get(name, 0.0)
        self._of[name] = ratio

    @property
    def mean(self) -> float | None:
        """The mean ratio; None without a ratio."""
        return self._sum / len(self._of) if self._of else None


class Estimates:
    """Estimates of jobs, corrected while jobs run. Corrections `before` this call hold until a kind is measured."""

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self._measured: defaultdict[tuple[str, str, bool], _Ratios] = defaultdict(_Ratios)
        self._largest: dict[str, float] = {}
        self._before = dict(before or {})

    def learnt(self) -> dict[str, float]:
        """Return by kind and field the ratio of measured to given values, or the measured value if none was given."""
        own = {_key(*key): _of(ratios, key[1]) for key, ratios in self._measured.items()}
        return {**self._before, **{key: ratio for key, ratio in own.items() if ratio is not None}}

    def learn(self, task: Task, measured: Estimate) -> None:
        """Learn from the measured needs of a job, which replace earlier measurements of the same job."""
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
    # A job on a crowded device gets a smaller share than it needs, so the highest share of the kind counts.
    return ratios.mean if name == "seconds" else ratios.highest


def _key(kind: str, name: str, alone: bool) -> str:
    return f"{name} {'' if alone else 'over given '}of {kind}"


class Slowdowns:
    """Factors by which jobs of one kind slow those of another, beyond the effect of shares; learnt from finished jobs.

    The logarithm of a job's seconds is modeled as a sum. One term belongs to the job's own kind. Each neighboring kind
    has a term that is multiplied by the average number of its jobs. Each job corrects all terms by its deviation from
    the sum (normalized least mean squares: Haykin, "Adaptive Filter Theory", 1996, section 9.11).
    """

    def __init__(self, before: Mapping[str, Mapping[str, tuple[float, float]]] | None = None) -> None:
        self._own: dict[str, float] = {}
        self._of: dict[str, dict[str, tuple[float, float]]] = {a: dict(of) for a, of in (before or {}).items()}

    def learn(self, kind: str, seconds: float, beside: Mapping[str, float]) -> None:
        """Learn from a job that is done.

        `seconds` is the ratio of measured to given seconds, without the effect of the neighbors' shares. `beside` has
        the average number of neighbors by kind.
        """
        of = self._of.setdefault(kind, {})
        slower = sum(count * of.get(other, (0.0, 0.0))[0] for other, count in beside.items())
        own = self._own.setdefault(kind, math.log(seconds) - slower)
        step = _STEP * (math.log(seconds) - own - slower) / (1 + sum(count**2 for count in beside.values()))
        self._own[kind] = own + step
        for other, count in beside.items():
            factor, seen = of.get(other, (0.0, 0.0))
            of[other] = factor + step * count, seen + count

    def learnt(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Map a kind and a neighbor's kind to the logarithm of the factor, and to the number of neighbors seen."""
        return self._of

    def interference(self) -> Interference:
        """Return the factors of all pairs of kinds that were seen often enough."""
        return Interference(
            {
                (kind, other): min(max(1.0, math.exp(factor)), MOST_SLOWER)
                for kind, of in self._of.items()
                for other, (factor, seen) in of.items()
                if seen >= _SEEN
            }
        )


@dataclass(frozen=True)
class Learnt:
    """Estimates and slowdowns of the jobs that are started from one folder, on GPUs or on CPUs, kept under `key`."""

    key: str
    estimates: Estimates
    slowdowns: Slowdowns

    @staticmethod
    def recall(devices: Sequence[Device]) -> Learnt:
        """Return what earlier calls from this folder learnt in the last weeks, without invalid entries."""
        where = "GPUs" if any(device.gpu for device in devices) else "CPUs"
        key = f"packed on {where} from {Path.cwd()}"
        kept = recall(key) or {}
        taken = {name: float(value) for name, value in _items(kept.get("estimates")) if is_positive(value)}
        slower = {
            kind: {other: (float(found[0]), float(found[1])) for other, found in _items(of) if _is_factor(found)}
            for kind, of in _items(kept.get("slowdowns"))
        }
        return Learnt(key, Estimates(taken), Slowdowns(slower))

    def keep(self) -> None:
        remember(self.key, {"estimates": self.estimates.learnt(), "slowdowns": self.slowdowns.learnt()})


def _items(kept: Any) -> list[tuple[str, Any]]:
    return list(kept.items()) if isinstance(kept, Mapping) else []


def _is_factor(found: Any) -> bool:
    pair = isinstance(found, list) and len(found) == 2 and all(type(part) in (int, float) for part in found)
    return pair and all(math.isfinite(part) for part in found)
