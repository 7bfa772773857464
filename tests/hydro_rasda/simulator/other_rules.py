"""Rules and policies for questions that RASDA's paper leaves open; `hydro_rasda.simulator.Plan` takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from hydro_rasda.common.argument_checks import check_int, check_number, require
from hydro_rasda.schedulers import AshaState, AsyncSuccessiveHalving, Decision, Growth, Mode


@dataclass(frozen=True)
class VaryingFactors:
    """RASDA whose reduction and scaling factors differ from rung to rung.

    Attributes:
        milestones: Epochs at which a trial is decided, strictly increasing; the last is `max_t`.
        reduction_factors: By milestone, the last left out: one in so many trials goes on.
        scaling_factors: Likewise: the workers of those that go on grow by it; 1 keeps them.
        workers: Workers of a new trial.
        mode: "min" where a lower score is better, "max" where a higher is.
        wait: Longest wait for a trial's cohort, as a share of the time that the trial took (see `MilestoneBarrier`).

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
            AsyncSuccessiveHalving(self.max_t, milestone, factor, mode=self.mode, wait=self.wait)
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
    ) -> tuple[tuple[AshaState, ...], Decision]:
        """Decides at the rung whose milestone is `t`."""
        k = self.milestones.index(t)
        if k == len(self._rungs):
            return state, Decision.STOP
        rung, decision = self._rungs[k].report(state[k], trial, t, score)
        return (*state[:k], rung, *state[k + 1 :]), decision

    def decide(
        self, state: tuple[AshaState, ...], milestone: int, scores: Mapping[str, float]
    ) -> tuple[tuple[AshaState, ...], dict[str, Decision]]:
        """Decides as the milestone's rung does."""
        k = self.milestones.index(milestone)
        rung, decisions = self._rungs[k].decide(state[k], milestone, scores)
        return (*state[:k], rung, *state[k + 1 :]), decisions

    def complete(self, state: tuple[AshaState, ...], trial: str, t: int, score: float) -> tuple[AshaState, ...]:
        """Changes nothing: each rung already has the scores that it decided by."""
        return state

    def workers_at(self, t: int) -> int:
        """The product of the scaling factors so far."""
        return self.workers * math.prod(self.scaling_factors[: self.milestones.index(t) + 1])


@dataclass(frozen=True)
class WhilePaying:
    """Grants more workers only as long as they were used efficiently where it was measured.

    A number of workers that has not been measured yet is granted to every trial that comes to it.

    Attributes:
        threshold: The least efficiency in (0, 1] at which it is worth to go from n workers to f * n:
            `t(n) / (f * t(f * n))`, where t is the time of an epoch.
        probed: By number of workers, seconds of an epoch that were measured before the run.
    """

    threshold: float
    probed: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, above=0.0)
        require(self.threshold <= 1, "threshold", self.threshold, "<= 1")

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
    """Splits the cluster evenly between the trials that are left, whatever the scaling factor.

    Attributes:
        step: A trial gets `base * step**k` workers, with the largest k that leaves as many for the others.
        surviving: Share of the trials left that are counted; `1 / reduction_factor` to give the workers of those that
            stop at the next milestone away beforehand.
    """

    step: int = 2
    surviving: float = 1.0

    def __post_init__(self) -> None:
        check_int("step", self.step, at_least=2)
        check_number("surviving", self.surviving, above=0.0)
        require(self.surviving <= 1, "surviving", self.surviving, "<= 1")

    def __call__(self, growth: Growth) -> int:
        workers = growth.base
        while workers * self.step * max(1.0, growth.alive * self.surviving) <= growth.capacity:
            workers *= self.step
        return max(growth.held, workers)
