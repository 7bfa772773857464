"""The state of a sweep, as its rule sees it."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from hydro_rasda.schedulers.ranking import Mode

End = Literal["done", "failed", "diverged"]
"""How a trial of the race ended before its last epoch: it ended itself ("done"), raised an error, or diverged."""


class Interval(NamedTuple):
    """The epochs of a trial between two decisions on it.

    Attributes:
        start: The milestone at which the interval begins; 0 for a new trial.
        config: The trial's hyperparameters in the interval.
        copy_of: The trial whose weights the interval begins with; None if it begins with the trial's own weights.
    """

    start: int
    config: Mapping[str, Any]
    copy_of: int | None = None


@dataclass(slots=True)
class Standing:
    """The state of one trial of a sweep.

    Attributes:
        number: 0, 1, ... in the order of sampling.
        epoch: The milestone that the trial reached last; 0 before the first.
        goal: The milestone that the trial is on its way to; None if it waits or was dropped.
        dropped: True if the rule has stopped the trial.
        curve: The metric after each epoch up to `epoch`; NaN once the trial had diverged or failed.
        intervals: The trial's training so far, one interval for each time that it continued.
    """

    number: int
    config: Mapping[str, Any]
    epoch: int = 0
    goal: int | None = None
    dropped: bool = False
    curve: dict[int, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)

    @property
    def score(self) -> float:
        """The metric at the milestone where the trial stands; NaN before the first, or if it diverged or failed."""
        return self.curve.get(self.epoch, math.nan)


_Entry = tuple[float, int]
"""A finite score, negated if more is better, and its trial."""


_PART = 500
"""A part of a ranking is split if it has more than twice this number of entries."""


@dataclass
class _Ranking:
    """Entries in rising order, in several lists, so that adding an entry is fast even if there are many entries."""

    parts: list[list[_Entry]] = field(default_factory=list)

    def add(self, entry: _Entry) -> None:
        if not self.parts:
            self.parts.append([])
        at = bisect_right(self.parts, entry, lo=1, key=itemgetter(0)) - 1
        insort(part := self.parts[at], entry)
        if len(part) > 2 * _PART:
            self.parts[at : at + 1] = part[:_PART], part[_PART:]

    def __iter__(self) -> Iterator[_Entry]:
        return chain.from_iterable(self.parts)

    def best(self, count: int) -> _Entry | None:
        """Return the worst of the best `count` entries, or of all if there are fewer; None if there are none."""
        for part in self.parts:
            if count <= len(part):
                return part[count - 1]
            count -= len(part)
        return self.parts[-1][-1] if self.parts else None


class SweepState:
    """The state of a sweep, or of the race at full size. Rules only read it; the sweep or the race changes it.

    Attributes:
        mode: "min" if a lower score is better, "max" if a higher one is. With several metrics, a score is the trial's
            rank among all trials that reached a milestone. Rank 0 is the best, so the mode is then "min".
        max_t: Epochs of a full training.
        top_k: Number of finalists.
        seed: The run's seed. A rule that needs random numbers derives them from the seed and the state.
        waiting: Trials that wait for a decision, at a milestone or as new trials; in order of arrival.
        training: Trials that are on their way to a milestone.
        scores: `scores[milestone][trial]` is the score of a trial that reached the milestone; NaN if it diverged or
            failed.
        averages: In the race, `averages[milestone][trial]` is the score of the trial's averaged weights. An entry is
            missing if the trial has no averages, or if `scores` already has the score of its averages.
        ended: In the race, maps each trial that cannot train any further, whatever the rule decides, to the way it
            ended.
        spent: Epochs that all trials have trained so far.
        at_chance: In the race, True if the score of a constant prediction is known, and no compared trial beats it.
        left: Number of configurations that can be admitted now; 0 if none are left.
        idle: True if a device has no work until the rule lets a trial continue; otherwise False.
    """

    def __init__(self, mode: Mode, max_t: int, top_k: int, seed: int = 0) -> None:
        self.mode, self.max_t, self.top_k, self.seed = mode, max_t, top_k, seed
        self.trials: dict[int, Standing] = {}
        self.waiting: dict[int, Standing] = {}
        self.training: dict[int, Standing] = {}
        self.scores: dict[int, dict[int, float]] = {}
        self.averages: dict[int, dict[int, float]] = {}
        self.ended: dict[int, End] = {}
        self.spent = 0
        self.at_chance = False
        self.left = 0
        self.idle = False
        self._at: dict[int, dict[int, Standing]] = {}
        self._to: dict[int, dict[int, Standing]] = {}
        # `_ranked[milestone]` has all finite scores. `_hopeful[milestone]` is a heap of the scores of waiting trials.
        # The heap may also have scores of trials that no longer wait; `leading` removes these.
        self._ranked: dict[int, _Ranking] = {}
        self._hopeful: dict[int, list[_Entry]] = {}
        self._diverged: set[int] = set()

    def waiting_at(self, epoch: int) -> Mapping[int, Standing]:
        """Return the trials that wait at a milestone; at 0, the new trials."""
        return self._at.get(epoch, {})

    def training_to(self, epoch: int) -> Mapping[int, Standing]:
        """Return the trials that are on their way to a milestone."""
        return self._to.get(epoch, {})

    def best(self, count: int) -> list[int]:
        """Return the `count` best trials, first by epochs, then by score. Diverged and failed trials are left out."""
        found: dict[int, None] = {}
        for stop in sorted(self._ranked, reverse=True):
            for _, number in self._ranked[stop]:
                if len(found) == count:
                    return list(found)
                if number not in self._diverged:
                    found[number] = None
        return list(found)

    def leading(self, stop: int, count: int) -> list[int]:
        """Return the trials that wait at a milestone and are among the best `count` of all that reached it, best first.

        The time for a call hardly grows with the number of trials, so that a rule can ask after each arrival.
        """
        if count < 1 or stop not in self._ranked or (last := self._ranked[stop].best(count)) is None:
            return []
        hopeful, found = self._hopeful[stop], list[_Entry]()
        while hopeful and hopeful[0] <= last:
            if (entry := heappop(hopeful))[1] in self.waiting_at(stop):  # the other trials no longer wait
                found.append(entry)
        for entry in found:
            heappush(hopeful, entry)
        return [number for _, number in found]

    def admit(self, number: int, config: Mapping[str, Any]) -> None:
        """Add a new trial, which waits for its first milestone."""
        self._put(Standing(number, config))

    def go_on(self, number: int, to: int, config: Mapping[str, Any] | None = None, copy_of: int | None = None) -> None:
        """Let a trial train to a milestone, perhaps with another configuration or as a copy of another trial.

        A trial that becomes a copy no longer counts as diverged.
        """
        standing = self._taken(number)
        if copy_of is not None:
            self._diverged.discard(number)
        standing.goal, standing.dropped, standing.config = to, False, config or standing.config
        standing.intervals.append(Interval(standing.epoch, standing.config, copy_of))
        self._put(standing)

    def drop(self, number: int) -> None:
        standing = self._taken(number)
        standing.dropped = True
        self._put(standing)

    def come(
        self, number: int, curve: Mapping[int, float], score: float | None = None, averaged: float | None = None
    ) -> None:
        """Note that a trial reached its `goal`, or ended before it.

        Args:
            score: The score that is compared at the milestone; None for the metric there.
            averaged: The score of the trial's averaged weights there; None if it has none, or if `score` is that score.
        """
        standing = self._taken(number)
        stop = standing.goal
        assert stop is not None
        standing.epoch, standing.goal = stop, None
        standing.curve |= curve
        score = self.scores.setdefault(stop, {})[number] = standing.score if score is None else score
        if averaged is not None:
            self.averages.setdefault(stop, {})[number] = averaged
        if math.isfinite(score):
            entry = score if self.mode == "min" else -score, number
            self._ranked.setdefault(stop, _Ranking()).add(entry)
            heappush(self._hopeful.setdefault(stop, []), entry)
        else:
            self._diverged.add(number)
        self._put(standing)

    def place(self, stop: int, places: Mapping[int, float]) -> None:
        """Replace the scores of all trials that reached a milestone by their `places` among them; 0 is the best."""
        self.scores[stop] |= places
        in_order = sorted((place, number) for number, place in places.items() if math.isfinite(place))
        self._ranked[stop] = _Ranking([in_order] if in_order else [])
        self._hopeful[stop] = [entry for entry in in_order if entry[1] in self.waiting_at(stop)]
        for number, place in places.items():
            self.trials[number].curve[stop] = place

    def _taken(self, number: int) -> Standing:
        standing = self.trials[number]
        if standing.goal is not None:
            del self.training[number], self._to[standing.goal][number]
        elif not standing.dropped:
            del self.waiting[number], self._at[standing.epoch][number]
        return standing

    def _put(self, standing: Standing) -> None:
        number = standing.number
        self.trials[number] = standing
        if standing.goal is not None:
            self.training[number] = standing
            self._to.setdefault(standing.goal, {})[number] = standing
        elif not standing.dropped:
            self.waiting[number] = standing
            self._at.setdefault(standing.epoch, {})[number] = standing
