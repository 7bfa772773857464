"""Rules for the number of workers of a trial that survives a milestone.

The paper's RASDA gives a survivor all workers that it is due. They are wasted if they hardly shorten an epoch, if the
larger batch that comes with them teaches hardly more, or if other trials wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

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
