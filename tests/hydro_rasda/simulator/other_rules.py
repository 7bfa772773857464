"""Rules and policies for questions that RASDA's paper leaves open; `hydro_rasda.simulator.Plan` takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from hydro_rasda.schedulers import AshaState, AsyncSuccessiveHalving, Decision, Growth, Mode


@dataclass(frozen=True)
class VaryingFactors:
    """RASDA whose reduction and scaling factors differ from rung to rung.

    Both factors are listed by milestone, the last one (`max_t`) left out.
    """

    milestones: tuple[int, ...]
    reduction_factors: tuple[int, ...]
    scaling_factors: tuple[int, ...]
    workers: int = 1
    mode: Mode = "min"
    wait: float = 0.0
    _rungs: tuple[AsyncSuccessiveHalving, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
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

    A number of workers that has not been measured yet is granted to every trial that comes to it. `threshold` is the
    least efficiency at which it is worth to go from n workers to f * n: `t(n) / (f * t(f * n))`, where t is the time of
    an epoch.
    """

    threshold: float

    def __call__(self, growth: Growth) -> int:
        seconds, paid = growth.seconds, growth.base
        for n, more in pairwise(sorted(n for n in seconds if n <= growth.due)):
            if seconds[n] * n < self.threshold * seconds[more] * more:
                return max(growth.held, paid)
            paid = more
        return growth.due


def fill_cluster(growth: Growth) -> int:
    """Split the cluster evenly between the trials that are left, whatever the scaling factor."""
    workers = growth.base
    while workers * 2 * max(1, growth.alive) <= growth.capacity:
        workers *= 2
    return max(growth.held, workers)
