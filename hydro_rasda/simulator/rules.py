"""The rules of `hydro_rasda.schedulers` behind one interface.

At milestones, a `Rule` decides which trials go on and how many workers these are due; a `Resize` policy, its own or the
plan's, how many of these they take.
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
    """The contract of a scheduler for the simulator; `hydro_rasda.schedulers.RASDA` is one."""

    @property
    def max_t(self) -> int:
        """Epochs after which a trial is done."""

    @property
    def workers(self) -> int:
        """Workers of a new trial."""

    @property
    def milestones(self) -> tuple[int, ...]:
        """Epochs at which a trial is decided; the last is `max_t`."""

    @property
    def mode(self) -> Mode:
        """Return whether a lower score is better ("min") or a higher ("max")."""

    @property
    def wait(self) -> float:
        """Longest wait for a trial's cohort, as a share of the time that the trial took (see `MilestoneBarrier`)."""

    def resize(self, growth: Growth) -> int:
        """Decides with how many workers a survivor goes on."""

    def init(self) -> StateT:
        """The state before the first report."""

    def report(self, state: StateT, trial: str, t: int, score: float) -> tuple[StateT, Decision]:
        """Decides whether a trial goes on that comes to the milestone `t`, or waits, only where `wait` is above 0."""

    def decide(
        self, state: StateT, milestone: int, scores: Mapping[str, float]
    ) -> tuple[StateT, Mapping[str, Decision]]:
        """Decides the trials that waited for each other at a milestone."""

    def workers_at(self, t: int) -> int:
        """Workers due to a trial that goes on after the milestone `t`."""

    def complete(self, state: StateT, trial: str, t: int, score: float) -> StateT:
        """Records a trial that ended."""


class FixedWorkers(RASDA):
    """Halving in time alone: plain ASHA; synchronous halving where the halving has `wait=math.inf`.

    Args:
        halving: Decides which trials go on.
        workers: Workers of each trial, from start to end.

    Raises:
        ValueError: if `workers` is no integer above 0.
    """

    def __init__(self, halving: AsyncSuccessiveHalving, workers: int = 1) -> None:
        horizon = halving.max_t, halving.grace_period
        factors = halving.reduction_factor, halving.spacing
        super().__init__(*horizon, *factors, workers, max_workers=workers, mode=halving.mode, wait=halving.wait)


def synchronous_halving(
    max_t: int, grace_period: int = 1, reduction_factor: int = 4, workers: int = 1, mode: Mode = "min"
) -> FixedWorkers:
    """Successive halving that decides a milestone once all of its trials are there."""
    halving = AsyncSuccessiveHalving(max_t, grace_period, reduction_factor, mode=mode, wait=math.inf)
    return FixedWorkers(halving, workers)


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
        ValueError: if `patience` is no integer above 0, or the rule breaks its contract. Its milestones must be
            strictly increasing epochs, the last of which is `max_t`. It needs one worker or more, and no negative wait.
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
