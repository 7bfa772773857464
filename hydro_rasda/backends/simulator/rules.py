"""Who goes on, and with how many workers: the rules of ``hydro_rasda.schedulers`` in one shape.

A :class:`Rule` decides at milestones; a :class:`Resize` how many of the workers that are due a survivor takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from hydro_rasda.schedulers import AshaState, AsyncSuccessiveHalving, Decision, Mode, Verdict

from .resize import Resize, as_due

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
