"""Asynchronous successive halving, the stopping variant: it decides on a trial when the trial reports.

Li et al., "A system for massively parallel hyperparameter tuning" (https://arxiv.org/abs/1810.05934). Decisions are
those of Ray Tune's `ASHAScheduler` with one bracket. A trial continues unless it is worse than the
(1 - 1 / reduction_factor) quantile of the trials that reached the rung before it. One case differs on purpose: a trial
whose score is not finite stops here, but continues with Ray Tune.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import islice
from types import MappingProxyType

from hydro_rasda.common.argument_checks import check_int, check_mode, check_number, require
from hydro_rasda.schedulers.milestones import milestones
from hydro_rasda.schedulers.ranking import Mode, ranked


class Decision(StrEnum):
    """The next action of a trial that reported."""

    CONTINUE = "continue"
    STOP = "stop"
    WAIT = "wait"


class Rung(Mapping[str, float | None]):
    """The scores of the trials that reached a milestone, in order of arrival; None for a score that was not finite.

    A rung is immutable: `recorded` returns another rung. To avoid copies, both rungs share one dict, of which the older
    rung uses only the first entries.
    """

    def __init__(self, scores: Mapping[str, float | None] = MappingProxyType({})) -> None:
        self._scores = dict(scores)
        self._size = len(self._scores)
        self._finite = sorted(score for score in self._scores.values() if score is not None)

    def recorded(self, trial: str, score: float) -> Rung:
        """Return this rung with a trial's score, which replaces an earlier score of the same trial."""
        kept = score if math.isfinite(score) else None
        if trial in self:
            return Rung({**self, trial: kept})
        self._scores[trial] = kept
        if kept is not None:
            insort(self._finite, kept)
        more = Rung.__new__(Rung)
        more._scores, more._finite, more._size = self._scores, self._finite, self._size + 1
        return more

    def finite(self) -> Sequence[float]:
        """Return the finite scores in rising order. The caller must not change them."""
        self._part()
        return self._finite

    def __contains__(self, trial: object) -> bool:
        return trial in self._part()

    def __getitem__(self, trial: str) -> float | None:
        return self._part()[trial]

    def __iter__(self) -> Iterator[str]:
        return iter(self._part())

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"Rung({self._part()})"

    def _part(self) -> dict[str, float | None]:
        if len(self._scores) > self._size:
            Rung.__init__(self, dict(islice(self._scores.items(), self._size)))
        return self._scores


@dataclass(frozen=True)
class AshaState:
    """The scores of each rung so far, by milestone."""

    rungs: Mapping[int, Rung] = field(default_factory=lambda: MappingProxyType({}))

    def rung(self, milestone: int) -> Rung:
        """Return a milestone's rung; an empty rung if no trial has reached it."""
        found = self.rungs.get(milestone)
        return Rung() if found is None else found

    def recorded(self, milestone: int, trial: str, score: float) -> AshaState:
        rung = self.rung(milestone).recorded(trial, score)
        return AshaState(MappingProxyType({**self.rungs, milestone: rung}))


@dataclass(frozen=True)
class AsyncSuccessiveHalving:
    """ASHA: no trial waits for the others of its rung, unless `wait` is given.

    Attributes:
        max_t: Training iterations after which a trial is done (R in the paper).
        grace_period: Training iterations before the first decision (r in the paper).
        reduction_factor: One in `reduction_factor` trials continues (eta in the paper, rf in RASDA's).
        wait: Longest wait of a trial for its cohort at a milestone, as a share of its time to the milestone (see
            `MilestoneBarrier`). 0 is the paper's algorithm; inf is synchronous halving. If `wait` is not 0, `decide`
            decides on all trials that waited at the milestone.
    """

    max_t: int
    grace_period: int = 1
    reduction_factor: int = 4
    _: KW_ONLY
    mode: Mode = "min"
    wait: float = 0.0

    def __post_init__(self) -> None:
        check_int("max_t", self.max_t, at_least=1)
        check_int("grace_period", self.grace_period, at_least=1)
        check_int("reduction_factor", self.reduction_factor, at_least=2)
        check_mode(self.mode)
        check_number("wait", self.wait)
        require(self.grace_period <= self.max_t, "grace_period", self.grace_period, f"<= `max_t` ({self.max_t})")

    @cached_property
    def milestones(self) -> tuple[int, ...]:
        return milestones(self.grace_period, self.max_t, self.spacing)

    @property
    def spacing(self) -> int:
        """Factor from one milestone to the next."""
        return self.reduction_factor

    def init(self) -> AshaState:
        return AshaState()

    def report(self, state: AshaState, trial: str, t: int, score: float) -> tuple[AshaState, Decision]:
        """Decide whether a trial that reports a score at iteration `t` continues.

        The score goes to the latest milestone that is at most `t` and has no score of this trial yet. So a trial that
        does not report every iteration skips no decision. If there is no such milestone, the report changes nothing.

        Returns:
            The new state and the decision. If the trial must wait for its cohort, WAIT and the unchanged state. A trial
            that diverged does not wait.
        """
        if t >= self.max_t:
            return state, Decision.STOP
        milestone = self.open_rung(state, trial, t)
        if milestone is None:
            return state, Decision.CONTINUE
        if self.wait and math.isfinite(score):
            return state, Decision.WAIT
        stops = self._falls_short(state.rung(milestone), score)
        return state.recorded(milestone, trial, score), Decision.STOP if stops else Decision.CONTINUE

    def decide(
        self, state: AshaState, milestone: int, scores: Mapping[str, float]
    ) -> tuple[AshaState, dict[str, Decision]]:
        """Decide on the trials that waited for each other at a milestone.

        Each trial is compared with all trials that reached the milestone, including those decided with it; see
        `falls_short`.

        Returns:
            The new state, and the decision for each trial; the best trial comes first.
        """
        for trial, score in scores.items():
            state = state.recorded(milestone, trial, score)
        stops = {trial: self.falls_short(state, trial, milestone) for trial in ranked(scores, self.mode)}
        return state, {trial: Decision.STOP if falls else Decision.CONTINUE for trial, falls in stops.items()}

    def complete(self, state: AshaState, trial: str, t: int, score: float) -> AshaState:
        """Return the state with the last score of a trial that ended, so that later trials are compared with it."""
        milestone = self.open_rung(state, trial, t)
        return state if milestone is None else state.recorded(milestone, trial, score)

    def open_rung(self, state: AshaState, trial: str, t: int) -> int | None:
        """Return the milestone to which a trial's report at `t` belongs; None if the report decides nothing."""
        for milestone in reversed(self._rungs):
            if t >= milestone and trial not in state.rungs.get(milestone, ()):
                return milestone
        return None

    def falls_short(self, state: AshaState, trial: str, t: int) -> bool:
        """Tell whether a trial stops at milestone `t`, compared with all trials there, even those that came later.

        If trials wait for each other, the best `n / reduction_factor` of `n` trials continue, rounded up. Either all or
        none of the trials with equal scores continue.
        """
        rung = state.rung(t)
        if trial not in rung or t >= self.max_t:
            return False
        score = rung[trial]
        if self.wait and score is not None:
            scores = rung.finite()
            better = bisect_left(scores, score) if self.mode == "min" else len(scores) - bisect_right(scores, score)
            return better * self.reduction_factor >= len(scores)
        return self._falls_short(rung, math.nan if score is None else score)

    @cached_property
    def _rungs(self) -> tuple[int, ...]:
        # As in Ray Tune, `max_t` is a rung only if it equals `grace_period` times a power of `spacing`. If not, no
        # scores are recorded for `max_t`.
        *earlier, last = self.milestones
        meets = not earlier or earlier[-1] * self.spacing == last
        return (*earlier, last) if meets else tuple(earlier)

    def _falls_short(self, rung: Rung, score: float) -> bool:
        if not math.isfinite(score):
            return True
        others = rung.finite()
        if not others:
            return False
        # Compute the quantile with the same rounding errors as Ray Tune, which calls `numpy.percentile`. Otherwise, a
        # trial whose score equals the quantile might stop here, but continue there. This is why the share is multiplied
        # and divided by 100, and why scores are negated if lower is better.
        position = (1 - 1 / self.reduction_factor) * 100 / 100 * (len(others) - 1)
        below = int(position)
        above = min(below + 1, len(others) - 1)
        if self.mode == "max":
            return score < _between(others[below], others[above], position - below)
        return -score < _between(-others[~below], -others[~above], position - below)


def _between(low: float, high: float, weight: float) -> float:
    rise = high - low
    return low + rise * weight if weight < 0.5 else high - rise * (1 - weight)
