"""RASDA (halving in time, doubling in space), and rules for the number of workers of a surviving trial.

Aach et al., "Resource-Adaptive Successive Doubling for Hyperparameter Optimization", section 3.1.

At each milestone, asynchronous successive halving stops the worse trials. The survivors get `scaling_factor` times
their workers. The same factor spaces the milestones (eqs. 2 and 3), at `grace_period * scaling_factor**k`. In plain
ASHA, they are at `grace_period * reduction_factor**k`.

`wait=0, grow="due"` is the paper's algorithm. The paper has neither `wait` nor growth by measured gains. Both avoid
waste. More workers may hardly shorten an epoch, their larger batch may hardly improve the training, or other trials may
need them more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from hydro_rasda.common.argument_checks import check_choice, check_int, check_number, is_number, require
from hydro_rasda.schedulers.asha import AsyncSuccessiveHalving

LEAST_EFFICIENCY = 0.5
"""Below this efficiency, more than half of a trial's workers are wasted."""


class Growth(NamedTuple):
    """The facts that may determine the number of workers of a surviving trial.

    Attributes:
        held: Workers that the trial has, or had until it paused.
        due: Workers that the paper's rule gives the trial at its milestone, at most `max_workers`.
        base: Workers of a new trial.
        alive: Number of trials that run, wait or have not begun, this trial included.
        capacity: Number of workers on all nodes that are up.
        seconds: Maps a number of workers to the mean seconds of all epochs so far with that number. The seconds of an
            epoch are divided by its trial's `work`, its cost relative to other trials.
        free: Workers that no trial holds after the survivors of the same decision have released theirs.
        sharing: Number of trials that could use the free workers: the survivors of the same decision, and the trials
            that wait.
        own: Maps a number of workers to the seconds of an epoch of this trial.
        efficiency: The parallel efficiency that the trial measured itself; None to compute it from `own`.
        noise_scale: Number of workers whose batches together equal the trial's gradient noise scale (McCandlish et al.,
            "An empirical model of large-batch training", 2018); inf if unknown.
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
"""Decides the number of workers with which a surviving trial continues."""


def efficient(
    growth: Growth, factor: int = 2, least_efficiency: float = LEAST_EFFICIENCY, batch_over_noise: float = 1.0
) -> int:
    """Grant `due` workers or an even share of the free ones, whichever is less, if more workers pay off.

    More workers pay off under two conditions. First, the trial's parallel efficiency, relative to the fewest workers
    that it had, is above `least_efficiency`. Second, the grown batch stays within the gradient noise scale, because a
    larger batch needs almost proportionally more examples. A trial gets fewer workers than it has only if `due` is
    fewer. The number is `due` or `base * factor**k`.

    Args:
        factor: Factor by which workers grow.
        least_efficiency: More workers need a parallel efficiency above this; 0 accepts any efficiency.
        batch_over_noise: Largest batch, in gradient noise scales; inf accepts any batch.

    >>> survivor = Growth(held=2, due=8, base=2, alive=8, capacity=64, seconds={}, free=32, sharing=5)
    >>> efficient(survivor)
    4
    >>> efficient(survivor._replace(own={1: 60.0, 2: 60.0}))
    2
    """
    measured = growth.efficiency
    efficiency = parallel_efficiency(growth.own, growth.held) if measured is None else measured
    held = min(growth.held, growth.due)  # a restored search may have a lower `max_workers` than the trial has workers
    if efficiency <= least_efficiency:
        return held
    most: float = min(growth.due, growth.free // max(1, growth.sharing))
    if batch_over_noise < math.inf:
        most = min(most, growth.noise_scale * batch_over_noise)
    if most == growth.due:
        return growth.due
    workers = growth.base
    while workers * factor <= most:
        workers *= factor
    return max(held, workers)


def parallel_efficiency(seconds: Mapping[int, float], workers: int) -> float:
    """Return the speed-up over the fewest measured workers, divided by the growth of workers; 1 without a measurement.

    >>> parallel_efficiency({2: 80.0, 4: 50.0}, 4)
    0.8
    """
    if workers not in seconds:
        return 1.0
    fewest = min(seconds)
    return seconds[fewest] * fewest / (seconds[workers] * workers)


Grow = Literal["due", "efficient"]
GROW: tuple[str, ...] = get_args(Grow)


@dataclass(frozen=True)
class RASDA(AsyncSuccessiveHalving):
    """Algorithm 1 of the paper: asynchronous successive halving whose survivors get more workers.

    `wait` and `grow` go beyond the paper.

    Attributes:
        scaling_factor: Factor by which a survivor's workers grow, and by which milestones are spaced (sf).
        workers: Workers of a new trial (base_resources).
        max_workers: Most workers of a trial; None for no limit.
        grow: The rule for the number of workers of a survivor: "due", as in the paper, or "efficient"; see
            `hydro_rasda.schedulers.rasda`.
        least_efficiency: With "efficient", a survivor gets more workers only if its parallel efficiency is above this;
            0 accepts any efficiency.
        batch_over_noise: With "efficient", the largest batch of a survivor, in gradient noise scales; inf accepts any
            batch.
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
        """Return the number of milestones below `max_t` that a trial has survived when it continues after `t`."""
        return bisect_right(self.milestones, t, hi=len(self.milestones) - 1)

    def workers_at(self, t: int) -> int:
        """Return the workers due after iteration `t`: `workers * scaling_factor**(rungs survived)`, up to the limit.

        The first survivors grow at the first milestone, as in the paper's Fig. 7. By Algorithm 1 of the paper, they
        would grow only at the second milestone.

        >>> rule = RASDA(max_t=40, grace_period=5, workers=2)
        >>> [rule.workers_at(t) for t in (0, 5, 10, 20)]
        [2, 4, 8, 16]
        """
        due: int = self.workers * self.scaling_factor ** self.rungs_survived(t)
        return due if self.max_workers is None else min(due, self.max_workers)

    def resize(self, growth: Growth) -> int:
        """Return the number of workers with which a survivor continues, by the rule `grow`."""
        if self.grow == "due":
            return growth.due
        return efficient(growth, self.scaling_factor, self.least_efficiency, self.batch_over_noise)
