"""The rules of `hydro_rasda.schedulers` behind one interface.

At milestones, a `Rule` decides which trials continue and how many workers they are due. A `Resize` policy of the rule
or of the plan decides how many of these workers they take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from hydro_rasda.common.argument_checks import check_int, check_mode, check_number, require
from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving, Decision, Growth, Mode, Resize

StateT = TypeVar("StateT")


class Rule(Protocol[StateT]):
    """The interface of a scheduler for the simulator; `hydro_rasda.schedulers.RASDA` implements it."""

    @property
    def max_t(self) -> int:
        """Number of epochs after which a trial is done."""

    @property
    def workers(self) -> int:
        """Number of workers of a new trial."""

    @property
    def milestones(self) -> tuple[int, ...]:
        """Epochs at which trials are decided; the last one is `max_t`."""

    @property
    def mode(self) -> Mode:
        """Mode of the score: "min" if a lower one is better, "max" if a higher one is."""

    @property
    def wait(self) -> float:
        """Longest wait of a trial for its cohort, relative to its time to the milestone (see `MilestoneBarrier`)."""

    def resize(self, growth: Growth) -> int:
        """Decide the number of workers with which a survivor continues."""

    def init(self) -> StateT:
        """Return the rule's state before the first report of any trial."""

    def report(self, state: StateT, trial: str, t: int, score: float) -> tuple[StateT, Decision]:
        """Decide whether a trial at milestone `t` continues, stops or waits; return the new state and the decision.

        The trial waits only if `wait` is above 0.
        """

    def decide(
        self, state: StateT, milestone: int, scores: Mapping[str, float]
    ) -> tuple[StateT, Mapping[str, Decision]]:
        """Decide on the trials that waited for each other at a milestone; return the new state, and each decision."""

    def workers_at(self, t: int) -> int:
        """Return the number of workers that a trial is due when it continues after the milestone `t`."""

    def complete(self, state: StateT, trial: str, t: int, score: float) -> StateT:
        """Return the state after a trial has ended, at epoch `t` with this score."""


class FixedWorkers(RASDA):
    """Halving in time only: plain ASHA, or synchronous halving if the halving has `wait=math.inf`."""

    def __init__(self, halving: AsyncSuccessiveHalving, workers: int = 1) -> None:
        horizon = halving.max_t, halving.grace_period
        factors = halving.reduction_factor, halving.spacing
        super().__init__(*horizon, *factors, workers, max_workers=workers, mode=halving.mode, wait=halving.wait)


def synchronous_halving(
    max_t: int, grace_period: int = 1, reduction_factor: int = 4, workers: int = 1, mode: Mode = "min"
) -> FixedWorkers:
    """Return successive halving that decides a milestone once all of its trials are there."""
    halving = AsyncSuccessiveHalving(max_t, grace_period, reduction_factor, mode=mode, wait=math.inf)
    return FixedWorkers(halving, workers)


def random_search(max_t: int, workers: int = 1, mode: Mode = "min") -> FixedWorkers:
    """Return a rule that trains every trial to the end."""
    return FixedWorkers(AsyncSuccessiveHalving(max_t, grace_period=max_t, mode=mode), workers)


@dataclass(frozen=True)
class Plan(Generic[StateT]):
    """A rule with its policies for workers and waiting, as the simulator takes it.

    Attributes:
        rule: Decides which trials continue.
        resize: Decides the number of workers of a survivor; None lets `rule.resize` decide.
        patience: After this number of starts in a row that overtook the longest waiting trial, that trial is next; see
            `place`.

    Raises:
        ValueError: if `patience` is not an integer above 0, or the rule breaks its contract. Its milestones must be
            strictly increasing epochs that end with `max_t`. It needs at least one worker, and no negative wait.
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
