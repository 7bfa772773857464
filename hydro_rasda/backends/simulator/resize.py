"""How many workers a survivor of a milestone goes on with.

The paper's RASDA takes all that are due; the other rules here are for its open questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from hydro_rasda.checks import check_int, check_number


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
