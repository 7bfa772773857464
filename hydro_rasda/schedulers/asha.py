"""Asynchronous successive halving, the stopping variant: a trial is decided when it reports.

Li et al., "A system for massively parallel hyperparameter tuning" (https://arxiv.org/abs/1810.05934),
decided as Ray Tune's ``ASHAScheduler`` with one bracket decides it: a trial goes on unless it is worse than
the (1 - 1/rf) quantile of those that came to the rung before it. One difference is meant: a trial whose
score is not finite stops here, and goes on there.
"""

from __future__ import annotations

import copy
import math
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import TypedDict

from hydro_rasda.checks import check_int, check_mode
from hydro_rasda.config import Mode
from hydro_rasda.schedulers.milestones import milestones


class Decision(str, Enum):
    """What a trial that reported does next."""

    CONTINUE = "continue"
    STOP = "stop"


class PlainAshaState(TypedDict):
    """An :class:`AshaState` in JSON's own types: per rung its milestone and (trial, score), as they came."""

    rungs: list[tuple[int, list[tuple[str, float | None]]]]


class Rung(Mapping[str, float | None]):
    """The scores that came to a milestone, None where one was not finite, in order of arrival.

    A value: what :meth:`recorded` gives leaves this one as it is. The two share one record all the same, of which
    the older one knows its part, so that a run of n reports costs no n copies.

    Args:
        scores: Trial -> score.
    """

    def __init__(self, scores: Mapping[str, float | None] = MappingProxyType({})) -> None:
        self._scores = dict(scores)
        self._size = len(self._scores)
        self._finite = sorted(score for score in self._scores.values() if score is not None)

    def recorded(self, trial: str, score: float) -> Rung:
        """This rung with one more score, or with a trial's other one."""
        kept = score if math.isfinite(score) else None
        if trial in self:
            return Rung({**self, trial: kept})
        self._scores[trial] = kept
        if kept is not None:
            insort(self._finite, kept)
        more = copy.copy(self)
        more._size += 1
        return more

    def finite(self) -> Sequence[float]:
        """Its finite scores, rising; not to be changed."""
        self._part()
        return self._finite

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
    """What came to each rung so far.

    Attributes:
        rungs: Milestone -> its scores, in order of arrival.
    """

    rungs: Mapping[int, Rung] = field(default_factory=lambda: MappingProxyType({}))

    def recorded(self, milestone: int, trial: str, score: float) -> AshaState:
        """This state with one more score at a rung."""
        rung = self.rungs.get(milestone, Rung()).recorded(trial, score)
        return AshaState(MappingProxyType({**self.rungs, milestone: rung}))

    def to_plain(self) -> PlainAshaState:
        """Lists, strings and numbers alone; ``json.dumps(..., allow_nan=False)`` takes it."""
        return {"rungs": [(milestone, list(rung.items())) for milestone, rung in self.rungs.items()]}

    @classmethod
    def from_plain(cls, plain: PlainAshaState) -> AshaState:
        """The inverse of :meth:`to_plain`, before or after a trip through JSON."""
        return cls(MappingProxyType({milestone: Rung(dict(rung)) for milestone, rung in plain["rungs"]}))


@dataclass(frozen=True)
class AsyncSuccessiveHalving:
    """ASHA: no trial waits for the others of its rung.

    Attributes:
        max_t: ``R``: training iterations after which a trial is done.
        grace_period: ``r``: iterations before the first decision.
        reduction_factor: ``eta`` in the paper, ``rf`` in RASDA.
        mode: "min" where a lower score is better, "max" where a higher is.
        spacing: From one milestone to the next the iterations grow by this factor; None for
            ``reduction_factor``, as in the paper.

    Raises:
        TypeError: a number is no integer.
        ValueError: a number is out of range, ``grace_period`` is above ``max_t``, or ``mode`` is unknown.
    """

    max_t: int
    grace_period: int = 1
    reduction_factor: int = 4
    mode: Mode = "min"
    spacing: int | None = None

    def __post_init__(self) -> None:
        check_int("max_t", self.max_t, at_least=1)
        check_int("grace_period", self.grace_period, at_least=1)
        check_int("reduction_factor", self.reduction_factor, at_least=2)
        if self.spacing is not None:
            check_int("spacing", self.spacing, at_least=2)
        check_mode(self.mode)
        if self.grace_period > self.max_t:
            raise ValueError(f"`grace_period` is {self.grace_period}, but must be <= `max_t` ({self.max_t})")

    @cached_property
    def milestones(self) -> tuple[int, ...]:
        """The training iterations at which a trial is decided; the last is ``max_t``."""
        return milestones(self.grace_period, self.max_t, self._factor)

    @property
    def _factor(self) -> int:
        return self.reduction_factor if self.spacing is None else self.spacing

    def init(self) -> AshaState:
        """The state before the first report."""
        return AshaState()

    def report(self, state: AshaState, trial: str, t: int, score: float) -> tuple[AshaState, Decision]:
        """Decides whether a trial goes on.

        The deepest rung that ``t`` has reached *or passed* and that has no score of this trial takes the
        score, so that sparse reports skip no decision. A report without such a rung changes nothing.

        Args:
            state: What came before; left as it is.
            trial: The trial's name.
            t: Its training iteration.
            score: Its metric at ``t``.

        Returns:
            The new state and the decision.
        """
        if t >= self.max_t:
            return state, Decision.STOP
        milestone = self.open_rung(state, trial, t)
        if milestone is None:
            return state, Decision.CONTINUE
        stops = self._falls_short(state.rungs.get(milestone, Rung()), score)
        return state.recorded(milestone, trial, score), Decision.STOP if stops else Decision.CONTINUE

    def complete(self, state: AshaState, trial: str, t: int, score: float) -> AshaState:
        """Records the last score of a trial that ended: later trials are measured by it."""
        milestone = self.open_rung(state, trial, t)
        return state if milestone is None else state.recorded(milestone, trial, score)

    def open_rung(self, state: AshaState, trial: str, t: int) -> int | None:
        """The milestone that a report at ``t`` is decided at; None where it decides nothing."""
        open_ = (m for m in reversed(self._rungs) if t >= m and trial not in state.rungs.get(m, ()))
        return next(open_, None)

    def falls_short(self, state: AshaState, trial: str, t: int) -> bool:
        """Whether a trial that stands at a milestone, undecided, stops there, measured by all that came there."""
        rung = state.rungs.get(t, Rung())
        if trial not in rung or t >= self.max_t:
            return False
        score = rung[trial]
        return self._falls_short(rung, math.nan if score is None else score)

    @cached_property
    def _rungs(self) -> tuple[int, ...]:
        # Ray has a rung at max_t only where the multiplication meets it; a last score then goes to no other
        # rung.
        *earlier, last = self.milestones
        meets = not earlier or earlier[-1] * self._factor == last
        return (*earlier, last) if meets else tuple(earlier)

    def _falls_short(self, rung: Rung, score: float) -> bool:
        if not math.isfinite(score):
            return True
        others = rung.finite()
        if not others:
            return False
        # As numpy.percentile rounds, and so Ray: where scores are equal the last bit decides. Hence also the
        # percentage, and negated scores rather than the opposite quantile.
        position = (1 - 1 / self.reduction_factor) * 100 / 100 * (len(others) - 1)
        below = int(position)
        above = min(below + 1, len(others) - 1)
        if self.mode == "max":
            return score < _between(others[below], others[above], position - below)
        return -score < _between(-others[~below], -others[~above], position - below)


def _between(low: float, high: float, weight: float) -> float:
    rise = high - low
    return low + rise * weight if weight < 0.5 else high - rise * (1 - weight)
