"""The outcome of a simulated search, and how its GPU time was used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from hydro_rasda.common.short_values import show
from hydro_rasda.schedulers.ranking import Mode, ranked
from hydro_rasda.simulator.training_time import CostModel, Spread


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of one trial.

    Attributes:
        epochs: Number of trained epochs, without epochs that node failures undid.
        score: The score after the last of these epochs.
        ended: Virtual seconds from the start of the search to the end of the trial.
        waited: Seconds in the queue: before the start, at each resize and after each failure.
        restarts: Number of node failures that hit the trial.
        lost_epochs: Epochs that node failures undid; they are trained again.
    """

    epochs: int
    score: float
    ended: float
    waited: float
    restarts: int
    lost_epochs: int


@dataclass(frozen=True)
class Segment:
    """A period in which a trial had workers.

    Attributes:
        trial: The trial's row in the workload.
        start: Virtual seconds from the start of the search to the start of the period.
        stop: Virtual seconds from the start of the search to the end of the period.
        restart: Seconds from the start of the period to the first step.
    """

    trial: int
    start: float
    stop: float
    workers: int
    restart: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Cost and result of a simulated search.

    Attributes:
        trials: One outcome for each row of the workload.
        segments: All trials' segments, in the order in which they ended.
        max_t: Epochs of a full training.
        mode: "min" if a lower score is better, "max" if a higher one is.
        events: Number of simulated ends of epochs, failures and repairs.
    """

    trials: tuple[TrialOutcome, ...]
    segments: tuple[Segment, ...]
    gpus: int
    max_t: int
    mode: Mode
    events: int

    @property
    def seconds(self) -> float:
        """Virtual seconds until the last trial ended."""
        return max(trial.ended for trial in self.trials)

    @property
    def gpu_seconds(self) -> float:
        """GPU time of all trials, without idle GPUs."""
        return math.fsum((s.stop - s.start) * s.workers for s in self.segments)

    @property
    def utilization(self) -> float:
        """Share of the whole cluster's GPU time that trials had."""
        return self.gpu_seconds / (self.gpus * self.seconds)

    @property
    def epochs(self) -> int:
        """Number of epochs trained by all trials, including those that failures undid."""
        return sum(trial.epochs + trial.lost_epochs for trial in self.trials)

    @property
    def finished(self) -> tuple[int, ...]:
        """Trials that reached `max_t`."""
        return tuple(i for i, trial in enumerate(self.trials) if trial.epochs == self.max_t)

    @property
    def best_trial(self) -> int:
        """The best trial among those that reached `max_t` with a finite score; among all trials if none did."""
        sound = [i for i in self.finished if math.isfinite(self.trials[i].score)]
        among = sound or range(len(self.trials))
        return ranked({i: self.trials[i].score for i in among}, self.mode)[0]

    @property
    def best_score(self) -> float:
        """The score of `best_trial`."""
        return self.trials[self.best_trial].score


class Spending(NamedTuple):
    """GPU seconds of a search. Their sum is the time of the whole cluster from start to end.

    Attributes:
        training: Time that all epochs would have taken with the number of workers of a new trial.
        growing: Additional time of the epochs, because more workers do not shorten an epoch in proportion.
        restarts: Time from the grant of workers to the first step.
        idle: Time of GPUs that no trial had.
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
    """Split the GPU time of a search by use.

    `workers` is the number of workers of a new trial. Each trial is assumed to be on as few nodes as possible.
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
    """Say in words the main reason why one search is slower than another on the same cluster.

    `epochs` has two numbers: the epochs of the slower search, and those of the faster one.
    """
    more = {name: getattr(slower, name) - getattr(faster, name) for name in Spending._fields}
    most = max(more, key=more.__getitem__)
    if most == "training":
        return f"it trains {epochs[0]:.0f} epochs, not {epochs[1]:.0f}"
    if most == "idle":
        held, other = (gpus * spent.held / spent.reserved for spent in (slower, faster))
        return f"its trials hold {show(held)} GPUs on average, not {show(other)}"
    here, there = getattr(slower, most), getattr(faster, most)
    share = f"{here / slower.held:.0%} of GPU time"
    if most == "growing":
        return f"growing wastes {share}, not {there / faster.held:.0%}"
    return f"restarts are {share}" + (f" ({here / there:.1f} times as much)" if there else "")
