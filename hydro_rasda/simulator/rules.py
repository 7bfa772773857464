"""The rules of `hydro_rasda.schedulers` behind one interface.

At milestones, a `Rule` decides which trials go on and how many workers it grants them; a `Resize` policy, how many of
these they take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from hydro_rasda.checks import check_int, require
from hydro_rasda.schedulers import AshaState, AsyncSuccessiveHalving, Decision, Mode, Verdict
from hydro_rasda.simulator.resize import Resize, as_due

StateT = TypeVar("StateT")


class Rule(Protocol[StateT]):
    """What the simulator asks of a scheduler; `hydro_rasda.schedulers.RASDA` is one."""

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
        """Epochs at which a trial is decided; the last is `max_t`."""
        ...

    @property
    def mode(self) -> Mode:
        """Whether a lower score is better ("min") or a higher ("max")."""
        ...

    def init(self) -> StateT:
        """The state before the first report."""
        ...

    def report(self, state: StateT, trial: str, t: int, score: float) -> tuple[StateT, Verdict]:
        """Decides whether a trial goes on that comes to the milestone `t`, and on how many workers."""
        ...

    def complete(self, state: StateT, trial: str, t: int, score: float) -> StateT:
        """Records a trial that ended."""
        ...


@dataclass(frozen=True)
class FixedWorkers:
    """Plain ASHA: halving in time alone.

    Attributes:
        halving: Decides which trials go on.
        workers: Workers of each trial, from start to end.

    Raises:
        ValueError: where `workers` is no integer above 0.
    """

    halving: AsyncSuccessiveHalving
    workers: int = 1

    def __post_init__(self) -> None:
        check_int("workers", self.workers, at_least=1)

    @property
    def max_t(self) -> int:
        """Epochs after which a trial is done."""
        return self.halving.max_t

    @property
    def milestones(self) -> tuple[int, ...]:
        """Epochs at which a trial is decided."""
        return self.halving.milestones

    @property
    def mode(self) -> Mode:
        """Whether a lower score is better ("min") or a higher ("max")."""
        return self.halving.mode

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
    """RASDA whose reduction and scaling factors differ from rung to rung.

    Attributes:
        milestones: Epochs at which a trial is decided, strictly increasing; the last is `max_t`.
        reduction_factors: By milestone, the last left out: one in so many trials goes on.
        scaling_factors: Likewise: the workers of those that go on grow by it; 1 keeps them.
        workers: Workers of a new trial.
        mode: "min" where a lower score is better, "max" where a higher is.

    Raises:
        ValueError: where a number is no integer or out of range, milestones do not increase, or there are not as many
            factors as milestones below `max_t`.
    """

    milestones: tuple[int, ...]
    reduction_factors: tuple[int, ...]
    scaling_factors: tuple[int, ...]
    workers: int = 1
    mode: Mode = "min"
    _rungs: tuple[AsyncSuccessiveHalving, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_int("workers", self.workers, at_least=1)
        require(bool(self.milestones), "milestones", self.milestones, "one epoch or more")
        increase = all(before < after for before, after in pairwise(self.milestones))
        require(increase, "milestones", self.milestones, "strictly increasing")
        rungs = len(self.milestones) - 1
        for name in ("reduction_factors", "scaling_factors"):
            given = getattr(self, name)
            require(len(given) == rungs, name, given, f"{rungs} factors, one for each milestone below max_t")
        for factor in self.scaling_factors:
            check_int("scaling_factors", factor, at_least=1)
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
        """The state of each rung before the first report."""
        return tuple(rung.init() for rung in self._rungs)

    def report(
        self, state: tuple[AshaState, ...], trial: str, t: int, score: float
    ) -> tuple[tuple[AshaState, ...], Verdict]:
        """Decides at the rung whose milestone is `t`."""
        k = self.milestones.index(t)
        due = self.workers * math.prod(self.scaling_factors[: k + 1])
        if k == len(self._rungs):
            return state, Verdict(Decision.STOP, due)
        rung, decision = self._rungs[k].report(state[k], trial, t, score)
        return (*state[:k], rung, *state[k + 1 :]), Verdict(decision, due)

    def complete(self, state: tuple[AshaState, ...], trial: str, t: int, score: float) -> tuple[AshaState, ...]:
        """Changes nothing: each rung already has the scores that it decided by."""
        return state


@dataclass(frozen=True)
class Plan(Generic[StateT]):
    """A scheduler for the simulator.

    Attributes:
        rule: Decides which trials go on.
        resize: Decides on how many workers.
        patience: After so many starts of trials that waited less, the longest waiting one is next; see `place`.
    """

    rule: Rule[StateT]
    resize: Resize = as_due
    patience: int = 8


AnyPlan = Plan[Any]
