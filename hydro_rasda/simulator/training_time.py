"""The time that an epoch, a restart and a checkpoint take in data-parallel training.

An epoch on `n` workers, which are spread over `m` nodes, takes:

    epoch = max(steps / n * step, read) + serial
    step  = compute * slowest(n) / speed + max(0, allreduce(n, m) - overlap * compute)

Each worker keeps its batch size when workers are added. So an epoch has `steps / n` steps, and the compute of each step
takes as long as before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from hydro_rasda.common.argument_checks import check_is, check_number, require


@dataclass(frozen=True)
class Link:
    """A network connection.

    Attributes:
        bandwidth: Bytes per second in one direction.
        latency: Seconds that a message takes, independent of its size.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        check_number("bandwidth", self.bandwidth, above=0.0)
        check_number("latency", self.latency)


class Spread(NamedTuple):
    """The workers of one trial, and how they are spread over nodes.

    Attributes:
        speed: Speed of the slowest of these nodes, relative to the device of the cost model's step time.
    """

    workers: int
    nodes: int = 1
    speed: float = 1.0


@dataclass(frozen=True)
class CostModel:
    """The time that training one application takes on one machine.

    Attributes:
        step_seconds: Time of the forward and backward pass of one worker's batch, on a worker of speed 1.
        steps: Steps of an epoch on one worker.
        serial_seconds: Part of each epoch's time that more workers do not shorten: validation, start and end of the
            data loader.
        gradient_bytes: Size of the gradients, which are averaged over the workers after each step.
        intra: Connection of each worker to the others on its node.
        inter: Connection of each node to the others.
        overlap: Share of a step's compute during which gradients are already communicated.
        jitter: Standard deviation of a worker's step time, relative to its mean. A step ends with its slowest worker.
        epoch_noise: Standard deviation of the logarithm of an epoch's time.
        restart_seconds: Seconds from the grant of workers to a trial until its first step.
        checkpoint_seconds: Seconds to write a checkpoint, which happens at each milestone.
        dataset_bytes: Bytes that an epoch reads from shared storage; 0 if the data stay in memory.
        noise_scale: The gradient noise scale, in batches of one worker; inf if a larger batch needs no more examples.
            See `passes`.

    Raises:
        ValueError: if a value is out of range, or not finite where it must be.
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
    noise_scale: float = math.inf

    def __post_init__(self) -> None:
        check_is("intra", self.intra, Link)
        check_is("inter", self.inter, Link)
        check_number("noise_scale", self.noise_scale, above=0.0)
        for name in (field.name for field in fields(self) if field.type == "float" and field.name != "noise_scale"):
            check_number(name, getattr(self, name), above=0.0 if name in ("step_seconds", "steps") else None)
            require(math.isfinite(getattr(self, name)), name, getattr(self, name), "finite")

    def step(self, spread: Spread) -> float:
        """Return the seconds of one synchronous step."""
        compute = self.step_seconds / spread.speed * slowest(spread.workers, self.jitter)
        reduce = hierarchical_all_reduce(self.gradient_bytes, spread.workers, spread.nodes, self.intra, self.inter)
        return compute + max(0.0, reduce - self.overlap * compute)

    def epoch(self, spread: Spread, work: float = 1.0, storage: float = math.inf) -> float:
        """Return the expected seconds of one epoch.

        Args:
            work: Time of this trial's steps, relative to `step_seconds`, for example because its model is larger.
            storage: Bytes per second that this trial can read from shared storage.

        >>> CostModel(step_seconds=0.5, steps=100, serial_seconds=10).epoch(Spread(workers=5))
        20.0
        """
        return self.with_reading(self.training(spread) * work, storage)

    def training(self, spread: Spread) -> float:
        """Return the seconds of all steps of one epoch, for a trial whose `work` is 1."""
        return self.steps / spread.workers * self.step(spread)

    def with_reading(self, training: float, storage: float) -> float:
        """Return the seconds of one epoch, given the seconds of its steps. Data are read during the steps."""
        return max(training, self.dataset_bytes / storage) + self.serial_seconds

    def passes(self, workers: int) -> float:
        """Return the number of passes over the data that train as well as one pass with a single worker.

        With more workers, the batch is larger and needs more examples. McCandlish et al., "An empirical model of
        large-batch training" (2018), eq. 2.11: a batch of the noise scale needs twice the examples of a tiny batch.

        >>> CostModel(step_seconds=0.5, steps=100, noise_scale=4.0).passes(16)
        4.0
        """
        return (1 + workers / self.noise_scale) / (1 + 1 / self.noise_scale)

    def efficiency(self, spread: Spread) -> float:
        """Return the speed-up over one worker, divided by the number of workers.

        >>> CostModel(step_seconds=0.5, steps=100, serial_seconds=10).efficiency(Spread(workers=5))
        0.6
        """
        return self.epoch(Spread(1, speed=spread.speed)) / (spread.workers * self.epoch(spread))


def all_reduce(size: float, members: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce: `2 (n - 1) / n * size / bandwidth + 2 (n - 1) * latency` for n members.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). Each member has
    `size` bytes.

    >>> all_reduce(1e9, 4, Link(bandwidth=1e9, latency=0.25))
    3.0
    """
    hops = 2 * (members - 1)
    return hops / members * size / link.bandwidth + hops * link.latency


def hierarchical_all_reduce(size: float, workers: int, nodes: int, intra: Link, inter: Link) -> float:
    """Return the seconds of an all-reduce like NCCL's: a ring within each node, then a ring of nodes.

    >>> hierarchical_all_reduce(1e9, 8, 2, Link(1e9), Link(5e8))
    3.5
    """
    return all_reduce(size, math.ceil(workers / nodes), intra) + all_reduce(size, nodes, inter)


@lru_cache(maxsize=4096)
def slowest(workers: int, jitter: float) -> float:
    """Return the expected step time of the slowest worker, if step times are normal with mean 1 (Blom, 1958).

    >>> slowest(1, 0.1), round(slowest(64, 0.1), 3)
    (1.0, 1.234)
    """
    if workers == 1 or jitter == 0:
        return 1.0
    return 1.0 + jitter * NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))
