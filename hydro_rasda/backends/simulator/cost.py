"""What data-parallel training costs: seconds of an epoch, of a restart and of a checkpoint.

An epoch on ``n`` workers, spread over ``m`` nodes, takes::

    epoch = max(steps / n * step, read) + serial
    step  = compute * slowest(n) / speed + max(0, allreduce(n, m) - overlap * compute)

The local batch stays when workers are added, so an epoch has ``steps / n`` steps, each as long as before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from hydro_rasda.checks import check_number


@dataclass(frozen=True)
class Link:
    """A connection.

    Attributes:
        bandwidth: Bytes per second in one direction.
        latency: Seconds of one message.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_number("bandwidth", self.bandwidth, above=0.0)
        check_number("latency", self.latency)


@dataclass(frozen=True)
class Spread:
    """The workers of one trial, and where they sit.

    Attributes:
        workers: How many.
        nodes: Nodes that hold them.
        speed: Of the slowest of those nodes; 1 is the device that the cost model speaks of.
    """

    workers: int
    nodes: int = 1
    speed: float = 1.0


@dataclass(frozen=True)
class CostModel:
    """One application on one machine.

    Attributes:
        step_seconds: Forward and backward pass of one local batch on one worker of speed 1.
        steps: Steps of an epoch on one worker.
        serial_seconds: Of each epoch, what more workers do not shorten: validation, start and end of the data loader.
        gradient_bytes: What is reduced after each step.
        intra: Between the workers of one node, per worker.
        inter: Between nodes, per node.
        overlap: Share of a step's compute that hides communication.
        jitter: Standard deviation of a worker's step time, over its mean; a synchronous step waits for the slowest.
        epoch_noise: Standard deviation of the logarithm of an epoch's time.
        restart_seconds: From the grant of workers to the first step.
        checkpoint_seconds: Of one checkpoint, written at each milestone.
        dataset_bytes: Read from shared storage in each epoch; 0 where the data stay in memory.

    Raises:
        TypeError: a number is none.
        ValueError: a number is out of range.
    """

    step_seconds: float
    steps: float
    serial_seconds: float = 0.0
    gradient_bytes: float = 0.0
    intra: Link = Link(math.inf)
    inter: Link = Link(math.inf)
    overlap: float = 0.0
    jitter: float = 0.0
    epoch_noise: float = 0.0
    restart_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    dataset_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_seconds", "steps"):
            check_number(name, getattr(self, name), above=0.0)
        for name in ("serial_seconds", "gradient_bytes", "overlap", "jitter", "epoch_noise", "restart_seconds"):
            check_number(name, getattr(self, name))
        for name in ("checkpoint_seconds", "dataset_bytes"):
            check_number(name, getattr(self, name))

    def step(self, spread: Spread) -> float:
        """Seconds of one synchronous step."""
        compute = self.step_seconds / spread.speed * slowest(spread.workers, self.jitter)
        reduce = hierarchical_all_reduce(self.gradient_bytes, spread.workers, spread.nodes, self.intra, self.inter)
        return compute + max(0.0, reduce - self.overlap * compute)

    def epoch(self, spread: Spread, work: float = 1.0, storage: float = math.inf) -> float:
        """Expected seconds of one epoch.

        Args:
            spread: The trial's workers.
            work: Cost of this trial's step over that of ``step_seconds``: its model may be larger.
            storage: Bytes per second that shared storage gives to this trial.

        >>> CostModel(step_seconds=0.5, steps=100, serial_seconds=10).epoch(Spread(workers=5))
        20.0
        """
        train = self.steps / spread.workers * self.step(spread) * work
        return max(train, self.dataset_bytes / storage) + self.serial_seconds

    def efficiency(self, spread: Spread) -> float:
        """Speed-up over one worker, per worker.

        >>> CostModel(step_seconds=0.5, steps=100, serial_seconds=10).efficiency(Spread(workers=5))
        0.6
        """
        return self.epoch(Spread(1, speed=spread.speed)) / (spread.workers * self.epoch(spread))


def all_reduce(size: float, members: int, link: Link) -> float:
    r"""Seconds of a ring all-reduce: :math:`2 (n-1) / n \cdot b / B + 2 (n-1) \cdot l`.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

    Args:
        size: ``b``, in bytes.
        members: ``n``.
        link: Bandwidth ``B`` and latency ``l``.

    >>> all_reduce(1e9, 4, Link(bandwidth=1e9, latency=0.25))
    3.0
    """
    hops = 2 * (members - 1)
    return hops / members * size / link.bandwidth + hops * link.latency


def hierarchical_all_reduce(size: float, workers: int, nodes: int, intra: Link, inter: Link) -> float:
    """Seconds of an all-reduce within each node and between nodes, as NCCL does it: one ring after the other.

    >>> hierarchical_all_reduce(1e9, 8, 2, Link(1e9), Link(5e8))
    3.5
    """
    return all_reduce(size, math.ceil(workers / nodes), intra) + all_reduce(size, nodes, inter)


@lru_cache(maxsize=4096)
def slowest(workers: int, jitter: float) -> float:
    """Expected maximum of ``workers`` normal step times of mean 1 (Blom, 1958).

    >>> slowest(1, 0.1), round(slowest(64, 0.1), 3)
    (1.0, 1.234)
    """
    if workers == 1 or jitter == 0:
        return 1.0
    return 1.0 + jitter * NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))
