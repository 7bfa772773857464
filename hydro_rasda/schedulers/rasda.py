"""RASDA: halving in time, doubling in space; and rules for the number of workers of a survivor.

Aach et al., "Resource-Adaptive Successive Doubling for Hyperparameter Optimization", section 3.1.

At each milestone the worse trials stop, as asynchronous successive halving decides, and the survivors get
`scaling_factor` times their workers. That factor also spaces the milestones (eqs. 2 and 3): they lie at
`grace_period * scaling_factor**k`, where plain ASHA's lie at `grace_period * reduction_factor**k`.

`wait=0, grow="due"` is the paper's algorithm. The paper has neither `wait` nor growth by measured gains. Workers are
wasted if they hardly shorten an epoch, if the larger batch that comes with them teaches hardly more, or if other trials
wait for them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from hydro_rasda.common.argument_checks import check_choice, check_int, check_number, is_number, require
from hydro_rasda.schedulers.asha import AsyncSuccessiveHalving

LEAST_EFFICIENCY = 0.5
"""Below it, more than half of what a trial was given is lost."""


class Growth(NamedTuple):
    """The facts by which the number of workers of a surviving trial may be chosen.

    Attributes:
        held: Workers that the trial has, or had until it paused.
        due: Workers that the rule grants it.
        base: Workers of a new trial.
        alive: Trials that run, wait or have not begun, with this one.
        capacity: Workers on all nodes that are up.
        seconds: By number of workers, the mean seconds of all trials' epochs so far, each over its trial's `work`.
        free: Workers that no trial holds, once the survivors that are decided together have given theirs back.
        sharing: Trials that could use these: the survivors that are decided together, and those that wait.
        own: By number of workers, the seconds that an epoch of this trial took.
        efficiency: The trial's parallel efficiency as it measured that itself; None to take it from `own`.
        noise_scale: Workers whose batches together are as large as the trial's gradient noise scale (McCandlish et al.,
            "An empirical model of large-batch training", 2018); inf where it is not known.
    """

    held: int
    due: int
    base: int
    alive: int
    capacity: int
    seconds: Mapping[int, float]
    free: int = 0
    sharing: int = 1
    own: Mapping[int, float] = MappingProxyType({})
    efficiency: float | None = None
    noise_scale: float = math.inf


Resize = Callable[[Growth], int]
"""Decides with how many workers a surviving trial goes on."""


def efficient(
    growth: Growth, factor: int = 2, least_efficiency: float = LEAST_EFFICIENCY, batch_over_noise: float = 1.0
) -> int:
    """Grant the smaller of the workers due and an even share of the free ones, while more workers pay.

    More workers pay under two conditions. The trial's parallel efficiency, compared with the fewest workers that it
    had, is above a half. The grown batch stays within the gradient noise scale: beyond that scale, larger batches need
    almost proportionally more examples. A trial never gets fewer workers than it has. Sizes are `base * factor**k`, or
    the number due.

    Args:
        factor: By which workers grow.
        least_efficiency: In place of a half; 0 for any.
        batch_over_noise: How many noise scales a batch may have; inf for any.

    >>> survivor = Growth(held=2, due=8, base=2, alive=8, capacity=64, seconds={}, free=32, sharing=5)
    >>> efficient(survivor)
    4
    >>> efficient(survivor._replace(own={1: 60.0, 2: 60.0}))
    2
    """
    measured = growth.efficiency
    efficiency = parallel_efficiency(growth.own, growth.held) if measured is None else measured
    if efficiency <= least_efficiency:
        return growth.held
    most: float = min(growth.due, growth.free // max(1, growth.sharing))
    if batch_over_noise < math.inf:
        most = min(most, growth.noise_scale * batch_over_noise)
    if most == growth.due:
        return growth.due
    workers = growth.base
    while workers * factor <= most:
        workers *= factor
    return max(growth.held, workers)


def parallel_efficiency(seconds: Mapping[int, float], workers: int) -> float:
    """Speed-up over the fewest workers that were measured, divided by the growth since; 1 where it is not known.

    >>> parallel_efficiency({2: 80.0, 4: 50.0}, 4)
    0.8
    """
    if workers not in seconds:
        return 1.0
    fewest = min(seconds)
    return seconds[fewest] * fewest / (seconds[workers] * workers)


Grow = Literal["due", "efficient"]
GROW: tuple[str, ...] = ("due", "efficient")


@dataclass(frozen=True)
class RASDA(AsyncSuccessiveHalving):
    """Algorithm 1 of the paper: asynchronous successive halving whose survivors get more workers.

    `wait` and `grow` are two choices beyond the paper.

    Attributes:
        scaling_factor: The factor by which a survivor's workers grow, and milestones lie apart (sf).
        workers: Workers of a new trial (base_resources).
        max_workers: No trial gets more; None for no limit.
        grow: The rule for the number of workers of a survivor: "due", as in the paper, or "efficient"; see
            `hydro_rasda.schedulers.rasda`.
        least_efficiency: With "efficient", a survivor whose parallel efficiency is not above this keeps its workers; 0
            for any.
        batch_over_noise: With "efficient", a survivor's batch is at most so many of its gradient noise scales; inf for
            any.
    """

    reduction_factor: int = 2
    scaling_factor: int = 2
    workers: int = 1
    max_workers: int | None = None
    _: KW_ONLY
    grow: Grow = "due"
    least_efficiency: float = LEAST_EFFICIENCY
    batch_over_noise: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("scaling_factor", self.scaling_factor, at_least=2)
        check_int("workers", self.workers, at_least=1)
        check_int("max_workers", self.max_workers, at_least=self.workers, optional=True)
        check_choice("grow", self.grow, GROW)
        least = self.least_efficiency
        require(is_number(least) and 0 <= least < 1, "least_efficiency", least, "a number in [0, 1)")
        check_number("batch_over_noise", self.batch_over_noise, above=0)

    @property
    def spacing(self) -> int:
        return self.scaling_factor

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
