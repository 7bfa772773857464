"""The milestones at which halving is decided, and how long a trial waits there for its cohort.

ASHA decides on each trial when it arrives, compared with the trials that arrived before it. The first trials are
compared with few others, so that too many of them continue. At a `MilestoneBarrier`, a trial waits for the trials that
began with it. It waits at most for a share of the time that it took to get there. So a trial that dies or stalls delays
others only by that share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hydro_rasda.common.argument_checks import check_int, check_number


def milestones(min_t: int, max_t: int, factor: int) -> tuple[int, ...]:
    """Return the milestones of successive halving, `min_t * factor**k` for k = 0, 1, ..., the last one at `max_t`.

    The function multiplies integers. If it computed the number of rungs by a float logarithm, it would lose a rung, for
    example in `milestones(1, 243, 3)`. The first milestone that reaches or passes `max_t` becomes `max_t`.

    In RASDA's eqs. 2 and 3, the arguments are min_I, max_I and the scaling factor. In ASHA, `factor` is the reduction
    factor.

    >>> milestones(1, 243, 3)
    (1, 3, 9, 27, 81, 243)
    >>> milestones(5, 40, 2)
    (5, 10, 20, 40)
    >>> milestones(5, 30, 2)
    (5, 10, 20, 30)
    """
    check_int("min_t", min_t, at_least=1)
    check_int("factor", factor, at_least=2)
    check_int("max_t", max_t, at_least=min_t)
    found = []
    milestone = min_t
    while milestone < max_t:
        found.append(milestone)
        milestone *= factor
    return (*found, max_t)


def first_milestone(min_t: int, max_t: int, factor: int, warmup: float) -> int:
    """Return the first milestone at or after epoch `warmup`; `max_t` if `warmup` is beyond it.

    At an earlier milestone, a trial would be judged while its learning rate is still warming up. The later milestones
    are the same as without a warm-up.

    >>> first_milestone(1, 27, 3, warmup=0), first_milestone(1, 27, 3, warmup=2.5), first_milestone(1, 27, 3, warmup=50)
    (1, 3, 27)
    """
    return next((m for m in milestones(min_t, max_t, factor) if m >= warmup), max_t)


def sweep_milestones(min_t: int, max_t: int, factor: int) -> tuple[int, ...]:
    """Return the milestones of a sweep: the first one, and each later one whose successor is at most `max_t`.

    After the last of these milestones, training full-size models tells more for its cost than training surrogates.

    >>> sweep_milestones(1, 27, 3), sweep_milestones(1, 26, 3), sweep_milestones(27, 27, 3)
    ((1, 3, 9), (1, 3), (27,))
    """
    first, *later = milestones(min_t, max_t, factor)
    return (first, *(stop for stop in later if stop * factor <= max_t))


def first_look(grace_period: int | None, max_t: int) -> int:
    """Return the epoch at which a race first stops finalists: `grace_period`, or half of `max_t`, rounded up.

    >>> first_look(None, 27), first_look(3, 27)
    (14, 3)
    """
    return grace_period or math.ceil(max_t / 2)


def race_milestones(min_t: int, max_t: int, factor: int) -> tuple[int, ...]:
    """Return the milestones of a race. They include its last look, if there is one (see `last_look`).

    >>> race_milestones(14, 27, 2), race_milestones(2, 9, 2), race_milestones(2, 4, 2)
    ((14, 21, 27), (2, 4, 8, 9), (2, 4))
    """
    found = milestones(min_t, max_t, factor)
    look = last_look(found)
    return found if look is None else (*found[:-1], look, max_t)


def last_look(stops: tuple[int, ...]) -> int | None:
    """Return the epoch midway between the last two milestones; None if fewer than two epochs would remain after it.

    This milestone is the last look of a race: trials that are not worth the rest of their training stop there.

    >>> last_look((14, 27)), last_look((2, 4)), last_look((27,))
    (21, None, None)
    """
    look = (stops[-2] + stops[-1] + 1) // 2 if len(stops) > 1 else stops[-1]
    return look if stops[-1] - look >= 2 else None


class _Bound(NamedTuple):
    """The time `until` which a trial waits at a milestone.

    If another trial is as fast and began at `begun_by` or earlier, it arrives by the time `until`.
    """

    until: float
    begun_by: float


_NEVER = _Bound(math.inf, math.inf)


@dataclass
class _Milestone:
    """The trials of one milestone.

    `under_way` maps each trial that trains to the time at which it began, in rising order. `to_begin` has the trials
    that will begin later. `first` is the bound with the earliest `until`.
    """

    under_way: dict[str, float] = field(default_factory=dict)
    to_begin: set[str] = field(default_factory=set)
    scores: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, _Bound] = field(default_factory=dict)
    first: _Bound = _NEVER


class MilestoneBarrier:
    """Trials on their way to milestones, and trials that wait there.

    A trial waits for its cohort. The cohort consists of the trials on their way to the same milestone that would arrive
    before the wait ends, if they were as fast as the waiting trial. So no trial waits for one that began much later.

    Args:
        wait: The longest wait of a trial, relative to the time that it took to reach the milestone. With inf, waits
            have no bound, and trials also wait for those that have not begun yet.
    """

    def __init__(self, wait: float) -> None:
        check_number("wait", wait)
        self._wait = wait
        self._milestones: dict[int, _Milestone] = {}
        self._at: dict[str, int] = {}

    def expect(self, trial: str, milestone: int) -> None:
        """Note that a trial will train to a milestone, but has not yet begun to do so."""
        self._place(trial, milestone).to_begin.add(trial)

    def begin(self, trial: str, milestone: int, now: float) -> None:
        """Note that a trial begins to train to a milestone now. The time `now` must not decrease between calls."""
        self._place(trial, milestone).under_way[trial] = now

    def come(self, trial: str, milestone: int, score: float, now: float) -> None:
        """Let a trial wait at a milestone that it reached. If `begin` was not called, the trial counts as begun now."""
        since = self._milestones[self._at[trial]].under_way.get(trial, now) if trial in self._at else now
        most = math.inf if self._wait == math.inf else self._wait * (now - since)
        there = self._place(trial, milestone)
        there.bounds[trial] = bound = _Bound(now + most, since + most)
        there.first = min(there.first, bound)
        there.scores[trial] = score

    def leave(self, trial: str) -> None:
        """Remove a trial that has ended or paused. `begin` adds a paused trial again."""
        if (milestone := self._at.pop(trial, None)) is not None:
            there = self._milestones[milestone]
            there.under_way.pop(trial, None)
            there.to_begin.discard(trial)
            there.scores.pop(trial, None)
            if there.bounds.pop(trial, None) == there.first:
                there.first = min(there.bounds.values(), default=_NEVER)

    def waits(self, trial: str) -> bool:
        """Tell whether a trial has reached a milestone and waits for a decision."""
        return trial in self._at and trial in self._milestones[self._at[trial]].bounds

    def until(self, milestone: int) -> float:
        """Return the latest time of the decision at a milestone; inf if no trial waits there or waits have no bound."""
        return self._milestones[milestone].first.until if milestone in self._milestones else math.inf

    def take(self, now: float) -> dict[int, Mapping[str, float]]:
        """Remove the trials that are due for a decision, and return their scores by milestone, in order of arrival.

        All trials at a milestone are decided at the same time. The decision comes when the first of their waits is
        over, or when the cohort of the trial with this wait has arrived.
        """
        taken: dict[int, Mapping[str, float]] = {}
        for milestone, there in self._milestones.items():
            if there.bounds and self._is_over(there, now):
                taken[milestone] = there.scores
                for trial in there.scores:
                    del self._at[trial]
                there.scores, there.bounds, there.first = {}, {}, _NEVER
        return taken

    def _place(self, trial: str, milestone: int) -> _Milestone:
        self.leave(trial)
        self._at[trial] = milestone
        return self._milestones.setdefault(milestone, _Milestone())

    def _is_over(self, there: _Milestone, now: float) -> bool:
        if self._wait == math.inf:
            return not there.under_way and not there.to_begin
        return now >= there.first.until or next(iter(there.under_way.values()), math.inf) > there.first.begun_by
