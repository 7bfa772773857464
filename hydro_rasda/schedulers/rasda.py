"""RASDA: halving in time, doubling in space.

Aach et al., "Resource-Adaptive Successive Doubling for Hyperparameter Optimization", section 3.1.

At each milestone the worse trials stop, as asynchronous successive halving decides, and the survivors get
`scaling_factor` times their workers. That factor also spaces the milestones (eqs. 2 and 3): they lie at
`grace_period * scaling_factor**k`, where plain ASHA's lie at `grace_period * reduction_factor**k`.

`wait=0, grow="due"` is the paper's algorithm. The paper has neither `wait` nor growth by measured gains.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from hydro_rasda.checks import check_choice, check_int, check_number, is_number, require
from hydro_rasda.schedulers.asha import AshaState, AsyncSuccessiveHalving, Decision
from hydro_rasda.schedulers.growth import LEAST_EFFICIENCY, Growth, efficient
from hydro_rasda.schedulers.ranking import Mode

Grow = Literal["due", "efficient"]
GROW: tuple[str, ...] = ("due", "efficient")


class Verdict(NamedTuple):
    """The decision on a trial, and the workers due to it if it continues."""

    decision: Decision
    workers: int


@dataclass(frozen=True)
class RASDA:
    """Algorithm 1 of the paper, on top of `AsyncSuccessiveHalving`, and two choices beyond it: `wait` and `grow`.

    Attributes:
        max_t: Training iterations after which a trial is done (max_I in the paper).
        grace_period: The first milestone (min_I).
        reduction_factor: One in so many trials survives a milestone (rf).
        scaling_factor: The factor by which a survivor's workers grow, and milestones lie apart (sf).
        workers: Workers of a new trial (base_resources).
        max_workers: No trial gets more; None for no limit.
        wait: The longest that a trial waits at a milestone for its cohort, over the time that it took to reach it; see
            `MilestoneBarrier`. 0 as in the paper.
        grow: The rule for the number of workers of a survivor: "due", as in the paper, or "efficient"; see
            `hydro_rasda.schedulers.growth`.
        least_efficiency: With "efficient", a survivor whose parallel efficiency is not above this keeps its workers; 0
            for any.
        batch_over_noise: With "efficient", a survivor's batch is at most so many of its gradient noise scales; inf for
            any.
    """

    max_t: int
    grace_period: int = 1
    reduction_factor: int = 2
    scaling_factor: int = 2
    workers: int = 1
    max_workers: int | None = None
    mode: Mode = "min"
    wait: float = 0.0
    grow: Grow = "due"
    least_efficiency: float = LEAST_EFFICIENCY
    batch_over_noise: float = 1.0

    def __post_init__(self) -> None:
        check_int("scaling_factor", self.scaling_factor, at_least=2)
        check_int("workers", self.workers, at_least=1)
        if self.max_workers is not None:
            check_int("max_workers", self.max_workers, at_least=self.workers)
        check_choice("grow", self.grow, GROW)
        least = self.least_efficiency
        require(is_number(least) and 0 <= least < 1, "least_efficiency", least, "a number in [0, 1)")
        check_number("batch_over_noise", self.batch_over_noise, above=0)
        _ = self.halving

    @cached_property
    def halving(self) -> AsyncSuccessiveHalving:
        """The half of the rule that stops trials."""
        return AsyncSuccessiveHalving(
            self.max_t, self.grace_period, self.reduction_factor, self.mode, self.scaling_factor, self.wait
        )

    @cached_property
    def milestones(self) -> tuple[int, ...]:
        return self.halving.milestones

    def rungs_survived(self, t: int) -> int:
        """Milestones below `max_t` that a trial which goes on after iteration `t` has behind it."""
        return bisect_right(self.milestones, t, hi=len(self.milestones) - 1)

    def workers_at(self, t: int) -> int:
        """Workers due after iteration `t`: `workers * scaling_factor**(rungs survived)`, capped.

        The first survivors grow at the first milestone, as in the paper's Fig. 7; its Algorithm 1 counts
        from 0.

        >>> rule = RASDA(max_t=40, grace_period=5, workers=2)
        >>> [rule.workers_at(t) for t in (0, 5, 10, 20)]
        [2, 4, 8, 16]
        """
        due: int = self.workers * self.scaling_factor ** self.rungs_survived(t)
        return due if self.max_workers is None else min(due, self.max_workers)

    def resize(self, growth: Growth) -> int:
        """Return the number of workers with which a survivor continues, by `grow`."""
        if self.grow == "due":
            return growth.due
        return efficient(growth, self.scaling_factor, self.least_efficiency, self.batch_over_noise)

    def init(self) -> AshaState:
        return self.halving.init()

    def report(self, state: AshaState, trial: str, t: int, score: float) -> tuple[AshaState, Verdict]:
        """Decide as `AsyncSuccessiveHalving.report` does, and add the workers that are due."""
        state, decision = self.halving.report(state, trial, t, score)
        return state, Verdict(decision, self.workers_at(t))

    def decide(
        self, state: AshaState, milestone: int, scores: Mapping[str, float]
    ) -> tuple[AshaState, dict[str, Verdict]]:
        """Decide as `AsyncSuccessiveHalving.decide` does, and add the workers that are due."""
        state, decisions = self.halving.decide(state, milestone, scores)
        due = self.workers_at(milestone)
        return state, {trial: Verdict(decision, due) for trial, decision in decisions.items()}

    def complete(self, state: AshaState, trial: str, t: int, score: float) -> AshaState:
        """Records the last score of a trial that ended; see `AsyncSuccessiveHalving.complete`."""
        return self.halving.complete(state, trial, t, score)
