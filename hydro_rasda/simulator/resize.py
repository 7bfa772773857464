"""How many workers a trial goes on with that survives a milestone.

A rule has its own answer (`Rule.resize`): the paper's RASDA gives all that is due. The policies here are for questions
that the paper leaves open, and take its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from hydro_rasda.checks import check_int, check_number, require
from hydro_rasda.schedulers import Growth


def as_due(growth: Growth) -> int:
    """All workers that the rule grants, as in the paper."""
    return growth.due


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
