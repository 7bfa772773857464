"""The use of the GPU time of a search, and why one search takes longer than another."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from hydro_rasda.simulator.cost import CostModel, Spread
from hydro_rasda.simulator.outcome import Outcome


class Spending(NamedTuple):
    """GPU seconds of a search; all together are those of the whole cluster from start to end.

    Attributes:
        training: Time of the epochs on the workers of a new trial.
        growing: Further time of the epochs, because more workers do not shorten them in proportion.
        restarts: From the grant of workers to the first step.
        idle: GPUs that no trial had.
    """

    training: float
    growing: float
    restarts: float
    idle: float

    @property
    def held(self) -> float:
        """GPU seconds that trials had."""
        return self.training + self.growing + self.restarts

    @property
    def reserved(self) -> float:
        """GPU seconds of the whole cluster."""
        return self.held + self.idle


def spending(outcome: Outcome, cost: CostModel, workers: int, gpus_per_node: int) -> Spending:
    """Splits what a search took.

    Args:
        workers: Of a new trial.
        gpus_per_node: A trial is taken to be on as few nodes as can be.
    """

    @cache
    def epoch(count: int) -> float:
        return cost.epoch(Spread(count, math.ceil(count / gpus_per_node))) * cost.passes(count)

    training = growing = restarts = 0.0
    for segment in outcome.segments:
        restarts += segment.workers * segment.restart
        trained = segment.workers * (segment.stop - segment.start - segment.restart)
        useful = min(1.0, epoch(workers) * workers / (epoch(segment.workers) * segment.workers))
        training += trained * useful
        growing += trained * (1 - useful)
    idle = max(0.0, outcome.gpus * outcome.seconds - training - growing - restarts)
    return Spending(training, growing, restarts, idle)


def why(slower: Spending, faster: Spending, epochs: tuple[float, float], gpus: int) -> str:
    """Why a search takes longer than another on the same cluster: what makes up most of the difference, in words.

    Args:
        epochs: How many epochs either trains.
    """
    more = {name: getattr(slower, name) - getattr(faster, name) for name in Spending._fields}
    most = max(more, key=more.__getitem__)
    if most == "training":
        return f"it trains {epochs[0]:.0f} epochs, not {epochs[1]:.0f}"
    if most == "idle":
        held, other = (gpus * spent.held / spent.reserved for spent in (slower, faster))
        return f"its trials hold {held:,.3g} GPUs on average, not {other:,.3g}"
    here, there = getattr(slower, most), getattr(faster, most)
    share = f"{here / slower.held:.0%} of GPU time"
    if most == "growing":
        return f"growing wastes {share}, not {there / faster.held:.0%}"
    return f"restarts are {share}" + (f" ({here / there:.1f} times as much)" if there else "")
