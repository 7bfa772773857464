"""Who goes on, and with how many workers: the rules of ``hydro_rasda.schedulers`` in one shape.

A :class:`Rule` decides at milestones. A :class:`Resize` then says how many of the workers that are due a survivor
takes; the paper's RASDA takes them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from hydro_rasda.schedulers import AshaState, AsyncSuccessiveHalving, Decision, Mode, Verdict
from hydro_rasda.schedulers._checks import check_int

from ._checks import check_number

StateT = TypeVar("StateT")


class Rule(Protocol[StateT]):
    """What the simulator asks of a scheduler; ``hydro_rasda.schedulers.RASDA`` is one."""

    @property
    def max_t(self) -> int:
        """Epochs after which a trial is done."""
        ...

    @property
    def workers(self) -> int:
        """Workers of a new trial."""
        ...

    @property
    def milestones(self) -> tuple[int, ...]:
        """Epochs at which a trial is decided; the last is ``max_t``."""
        ...

    def init(self) -> StateT:
        """The state before the first report."""
        ...

    def report(self, state: StateT, trial: str, t: int, score: float) -> tuple[StateT, Verdict]:
        """Decides at a milestone."""
        ...

    def complete(self, state: StateT, trial: str, t: int, score: float) -> StateT:
        """Records a trial that ended."""
        ...


@dataclass(frozen=True)
class FixedWorkers:
    """Plain ASHA: halving in time alone.

    Attributes:
        halving: Decides.
        workers: Of each trial, from start to end.
    """

    halving: AsyncSuccessiveHalving
    workers: int = 1

    @property
    def max_t(self) -> int:
        """Epochs after which a trial is done."""
        return self.halving.max_t

    @property
    def milestones(self) -> tuple[int, ...]:
        """Epochs at which a trial is decided."""
        return self.halving.milestones

    def init(self) -> AshaState:
        """The state before the first report."""
        return self.halving.init()

    def report(self, state: AshaState, trial: str, t: int, score: float) -> tuple[AshaState, Verdict]:
        """Decides as the halving does."""
        state, decision = self.halving.report(state, trial, t, score)
        return state, Verdict(decision, self.workers)

    def complete(self, state: AshaState, trial: str, t: int, score: float) -> AshaState:
        """Records a trial that ended."""
        return self.halving.complete(state, trial, t, score)


@dataclass(frozen=True)
class VaryingFactors:
    """RASDA with a reduction and a scaling factor of their own at each rung.

    Each rung is decided by an :class:`AsyncSuccessiveHalving` of that rung's factor.

    Attributes:
        milestones: Epochs at which a trial is decided, strictly increasing; the last is ``max_t``.
        reduction_factors: ``rf`` of each milestone but the last.
        scaling_factors: ``sf`` of each milestone but the last; 1 keeps the workers.
        workers: Of a new trial.
        mode: "min" or "max".

    Raises:
        ValueError: the lengths do not agree.
    """

    milestones: tuple[int, ...]
    reduction_factors: tuple[int, ...]
    scaling_factors: tuple[int, ...]
    workers: int = 1
    mode: Mode = "min"
    _rungs: tuple[AsyncSuccessiveHalving, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rungs = len(self.milestones) - 1
        for name in ("reduction_factors", "scaling_factors"):
            given = getattr(self, name)
            if len(given) != rungs:
                raise ValueError(f"`{name}` is {given}, but must have {rungs} items, one a milestone below max_t")
        deciding = tuple(
            AsyncSuccessiveHalving(self.max_t, milestone, factor, self.mode)
            for milestone, factor in zip(self.milestones, self.reduction_factors)
        )
        object.__setattr__(self, "_rungs", deciding)

    @property
    def max_t(self) -> int:
        """Epochs after which a trial is done."""
        return self.milestones[-1]

    def init(self) -> tuple[AshaState, ...]:
        """The state before the first report: that of each rung."""
        return tuple(rung.init() for rung in self._rungs)

    def report(
        self, state: tuple[AshaState, ...], trial: str, t: int, score: float
    ) -> tuple[tuple[AshaState, ...], Verdict]:
        """Decides at the rung whose milestone is ``t``."""
        k = self.milestones.index(t)
        due = self.workers * math.prod(self.scaling_factors[: k + 1])
        if k == len(self._rungs):
            return state, Verdict(Decision.STOP, due)
        rung, decision = self._rungs[k].report(state[k], trial, t, score)
        return (*state[:k], rung, *state[k + 1 :]), Verdict(decision, due)

    def complete(self, state: tuple[AshaState, ...], trial: str, t: int, score: float) -> tuple[AshaState, ...]:
        """Changes nothing: each rung has the score that it was decided by."""
        return state


@dataclass(frozen=True)
class Growth:
    """What a survivor's number of workers may depend on.

    Attributes:
        held: Workers that the trial has.
        due: Workers that the rule grants it.
        base: Workers of a new trial.
        alive: Trials that train, wait or have not begun, this one included.
        capacity: Workers that are up.
        seconds: Of each number of workers that was tried so far, the mean seconds of an epoch over the trial's work.
    """

    held: int
    due: int
    base: int
    alive: int
    capacity: int
    seconds: Mapping[int, float]


Resize = Callable[[Growth], int]
"""Workers that a survivor goes on with."""


def as_due(growth: Growth) -> int:
    """The paper's rule: all that is due."""
    return growth.due


@dataclass(frozen=True)
class WhilePaying:
    """Grows only while the growth before it, as measured, paid.

    A growth that nobody has tried yet is always tried, by all that come to it before there is a measurement.

    Attributes:
        threshold: Least efficiency ``t(n) / (f * t(f * n))`` of a growth by ``f``, in (0, 1].
        probed: Of each number of workers, seconds of an epoch as measured before the run; none for none.
    """

    threshold: float
    probed: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, above=0.0)

    def __call__(self, growth: Growth) -> int:
        seconds = {**self.probed, **growth.seconds}
        paid = growth.base
        for n, more in pairwise(sorted(n for n in seconds if n <= growth.due)):
            if seconds[n] * n < self.threshold * seconds[more] * more:
                return max(growth.held, paid)
            paid = more
        return growth.due


@dataclass(frozen=True)
class FillCluster:
    """An adaptive scaling factor: a survivor takes its even share of the cluster, in powers of ``step``.

    Attributes:
        step: Workers are ``base * step**k``.
        surviving: Share of the living trials that the cluster is split between; ``1 / rf`` counts on the next halving.
    """

    step: int = 2
    surviving: float = 1.0

    def __post_init__(self) -> None:
        check_int("step", self.step, at_least=2)
        check_number("surviving", self.surviving, above=0.0)

    def __call__(self, growth: Growth) -> int:
        workers = growth.base
        while workers * self.step * max(1.0, growth.alive * self.surviving) <= growth.capacity:
            workers *= self.step
        return max(growth.held, workers)


@dataclass(frozen=True)
class Plan(Generic[StateT]):
    """A scheduler for the simulator.

    Attributes:
        rule: Decides who goes on.
        resize: Decides with how many workers.
        patience: Starts out of turn before the longest waiting trial comes first; see ``place``.
    """

    rule: Rule[StateT]
    resize: Resize = as_due
    patience: int = 8


AnyPlan = Plan[Any]
