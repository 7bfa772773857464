"""The rules of `hydro_rasda.schedulers` behind one interface.

At milestones, a `Rule` decides which trials go on and how many workers these are due; a `Resize` policy, its own or the
plan's, how many of these they take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from hydro_rasda.checks import check_int, check_mode, check_number, require
from hydro_rasda.schedulers import AshaState, AsyncSuccessiveHalving, Decision, Growth, Mode, Resize, Verdict

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

    @property
    def wait(self) -> float:
        """How long a trial waits for its fellows, at most, over the time that it took to come; see `Gathering`."""
        ...

    def resize(self, growth: Growth) -> int:
        """Decides with how many workers a survivor goes on."""
        ...

    def init(self) -> StateT:
        """The state before the first report."""
        ...

    def report(self, state: StateT, trial: str, t: int, score: float) -> tuple[StateT, Verdict]:
        """Decides whether a trial goes on that comes to the milestone `t`, and on how many workers.

        Or has it wait, only where `wait` is above 0.
        """
        ...

    def decide(
        self, state: StateT, milestone: int, scores: Mapping[str, float]
    ) -> tuple[StateT, Mapping[str, Verdict]]:
        """Decides the trials that waited for each other at a milestone."""
        ...

    def complete(self, state: StateT, trial: str, t: int, score: float) -> StateT:
        """Records a trial that ended."""
        ...


@dataclass(frozen=True)
class FixedWorkers:
    """Halving in time alone: plain ASHA; synchronous halving where the halving has `wait=math.inf`.

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

    @property
    def wait(self) -> float:
        """How long a trial waits for its fellows, at most, over the time that it took to come."""
        return self.halving.wait

    def resize(self, growth: Growth) -> int:
        """As many as before."""
        return growth.due

    def init(self) -> AshaState:
        """The state before the first report."""
        return self.halving.init()

    def report(self, state: AshaState, trial: str, t: int, score: float) -> tuple[AshaState, Verdict]:
        """Decides as the halving does."""
        state, decision = self.halving.report(state, trial, t, score)
        return state, Verdict(decision, self.workers)

    def decide(
        self, state: AshaState, milestone: int, scores: Mapping[str, float]
    ) -> tuple[AshaState, dict[str, Verdict]]:
        """Decides as the halving does."""
        state, decisions = self.halving.decide(state, milestone, scores)
        return state, {trial: Verdict(decision, self.workers) for trial, decision in decisions.items()}

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
        wait: How long a trial waits for its fellows, at most, over the time that it took to come; see `Gathering`.

    Raises:
        ValueError: where a number is no integer or out of range, milestones do not increase, or there are not as many
            factors as milestones below `max_t`.
    """

    milestones: tuple[int, ...]
    reduction_factors: tuple[int, ...]
    scaling_factors: tuple[int, ...]
    workers: int = 1
    mode: Mode = "min"
    wait: float = 0.0
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
            AsyncSuccessiveHalving(self.max_t, milestone, factor, self.mode, wait=self.wait)
            for milestone, factor in zip(self.milestones, self.reduction_factors)
        )
        object.__setattr__(self, "_rungs", deciding)

    @property
    def max_t(self) -> int:
        """Epochs after which a trial is done."""
        return self.milestones[-1]

    def resize(self, growth: Growth) -> int:
        """All that are due."""
        return growth.due

    def init(self) -> tuple[AshaState, ...]:
        """The state of each rung before the first report."""
        return tuple(rung.init() for rung in self._rungs)

    def report(
        self, state: tuple[AshaState, ...], trial: str, t: int, score: float
    ) -> tuple[tuple[AshaState, ...], Verdict]:
        """Decides at the rung whose milestone is `t`."""
        k = self.milestones.index(t)
        if k == len(self._rungs):
            return state, Verdict(Decision.STOP, self._due(k))
        rung, decision = self._rungs[k].report(state[k], trial, t, score)
        return (*state[:k], rung, *state[k + 1 :]), Verdict(decision, self._due(k))

    def decide(
        self, state: tuple[AshaState, ...], milestone: int, scores: Mapping[str, float]
    ) -> tuple[tuple[AshaState, ...], dict[str, Verdict]]:
        """Decides as the milestone's rung does."""
        k = self.milestones.index(milestone)
        rung, decisions = self._rungs[k].decide(state[k], milestone, scores)
        verdicts = {trial: Verdict(decision, self._due(k)) for trial, decision in decisions.items()}
        return (*state[:k], rung, *state[k + 1 :]), verdicts

    def complete(self, state: tuple[AshaState, ...], trial: str, t: int, score: float) -> tuple[AshaState, ...]:
        """Changes nothing: each rung already has the scores that it decided by."""
        return state

    def _due(self, k: int) -> int:
        return self.workers * math.prod(self.scaling_factors[: k + 1])


def synchronous_halving(
    max_t: int, grace_period: int = 1, reduction_factor: int = 4, workers: int = 1, mode: Mode = "min"
) -> FixedWorkers:
    """Successive halving that decides a milestone once all of its trials are there."""
    return FixedWorkers(AsyncSuccessiveHalving(max_t, grace_period, reduction_factor, mode, wait=math.inf), workers)


def random_search(max_t: int, workers: int = 1, mode: Mode = "min") -> FixedWorkers:
    """Every trial trains to the end."""
    return FixedWorkers(AsyncSuccessiveHalving(max_t, grace_period=max_t, mode=mode), workers)


@dataclass(frozen=True)
class Plan(Generic[StateT]):
    """A scheduler for the simulator.

    Attributes:
        rule: Decides which trials go on.
        resize: Decides on how many workers; None for what the rule itself decides.
        patience: After so many starts of trials that waited less, the longest waiting one is next; see `place`.

    Raises:
        ValueError: where `patience` is no integer above 0, or the rule breaks its contract: milestones are strictly
            increasing epochs, the last of which is `max_t`; it has one worker or more; it waits no negative time.
    """

    rule: Rule[StateT]
    resize: Resize | None = None
    patience: int = 8

    def __post_init__(self) -> None:
        check_int("patience", self.patience, at_least=1)
        check_mode(self.rule.mode)
        check_int("rule.workers", self.rule.workers, at_least=1)
        check_number("rule.wait", self.rule.wait)
        stops, max_t = self.rule.milestones, self.rule.max_t
        holds = all(before < after for before, after in pairwise((0, *stops))) and stops[-1:] == (max_t,)
        require(holds, "rule.milestones", stops, f"strictly increasing epochs, the last of them `max_t` ({max_t})")


AnyPlan = Plan[Any]
