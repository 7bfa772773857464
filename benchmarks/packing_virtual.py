"""Simulate jobs that share devices in virtual time, to compare packing policies on profiles like HyperSack's.

HyperSack's slides state some numbers. The page (`pages/packing.txt`) lists the further assumptions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hydro_rasda.common.argument_checks import check_function, check_is, check_number, require
from hydro_rasda.schedulers import Job, Policy, Room


@dataclass(frozen=True)
class Interference:
    """Slowdowns of jobs that share a machine.

    If jobs together ask for more compute than a machine has, all of them slow down in proportion. In addition, each
    neighbor slows a job by a factor, because of caches, memory bandwidth, and the processor that feeds the device.

    Attributes:
        beside: (Kind of a job, kind of a neighbor) -> that factor, at least 1. It is 1 for other kinds.
    """

    beside: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def speeds(self, jobs: Sequence[Job], rate: float = 1.0) -> list[float]:
        """Return the speed of each job beside the others, relative to its speed alone, on a machine with this rate.

        >>> jobs = [Job("a", 4, 0.5, 60, "cnn"), Job("b", 4, 0.75, 60, "vit")]
        >>> Interference({("cnn", "vit"): 1.25}).speeds(jobs)
        [0.64, 0.8]
        """
        crowd = max(1.0, sum(job.compute for job in jobs) / rate)
        slower = [crowd] * len(jobs)
        for i, job in enumerate(jobs):
            for j, other in enumerate(jobs):
                if i != j:
                    slower[i] *= self.beside.get((job.kind, other.kind), 1.0)
        return [1 / factor for factor in slower]


@dataclass(frozen=True)
class Machine:
    """A device.

    Attributes:
        memory: Memory in the unit of the jobs' memory.
        rate: Sum of the jobs' compute that it has room for; a reference device has 1.
        speed: Speed of a job that is alone there, relative to a reference device.
    """

    device: str
    memory: float
    rate: float = 1.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        for name in ("memory", "rate", "speed"):
            check_number(name, getattr(self, name), above=0)


@dataclass(frozen=True)
class PackingOutcome:
    """Outcome of some jobs under a policy.

    Attributes:
        seconds: The makespan, from the first start to the last end.
        busy: Mean share of the devices' compute that jobs asked for while others waited, at most 1; NaN if none waited.
        ended: Name of a job -> seconds at which it ended.
    """

    seconds: float
    busy: float
    ended: dict[str, float]


def simulate_packing(
    policy: Policy, jobs: Sequence[Job], machines: Sequence[Machine], interference: Interference
) -> PackingOutcome:
    """Run jobs to their end. Whenever a job ends, the policy decides again.

    Args:
        interference: How jobs slow each other. The policy does not know it.

    Raises:
        ValueError: if the policy does not start waiting jobs although all machines are idle.
    """
    check_function("policy", policy, 2, rule="a function of (jobs, rooms), such as worst_fit_decreasing")
    check_is("jobs", jobs, Job, several=True)
    check_is("machines", machines, Machine, several=True)
    require(len(machines) > 0, "machines", machines, "at least one machine")
    check_is("interference", interference, Interference)
    devices = {machine.device: _Device(machine, interference) for machine in machines}
    waiting = {job.name: job for job in jobs}
    ended: dict[str, float] = {}
    now = waited = busy = 0.0
    while len(ended) < len(jobs):
        if waiting:
            rooms = [device.room() for device in devices.values()]
            for name, where in policy(list(waiting.values()), rooms):
                devices[where].start(waiting.pop(name))
        passed = min(device.seconds_to_end() for device in devices.values())
        require(passed < math.inf, "jobs", [*waiting][:3], "jobs that fit a machine that is idle")
        if waiting:
            waited += passed
            busy += passed * sum(device.asked() for device in devices.values())
        now += passed
        for device in devices.values():
            ended |= dict.fromkeys(device.advance(passed), now)
    capacity = sum(machine.rate for machine in machines)
    return PackingOutcome(now, busy / waited / capacity if waited else math.nan, ended)


class _Device:
    """A machine and the jobs that run there."""

    def __init__(self, machine: Machine, interference: Interference) -> None:
        self._machine, self._interference = machine, interference
        self._jobs: list[Job] = []  # each with the seconds that it still takes
        self._speeds: list[float] = []

    def room(self) -> Room:
        """Return the memory and the compute that are left."""
        machine = self._machine
        memory = machine.memory - sum(job.memory for job in self._jobs)
        compute = machine.rate - sum(job.compute for job in self._jobs)
        return Room(machine.device, memory, compute, machine.rate, tuple(self._jobs))

    def start(self, job: Job) -> None:
        """Start a job on this machine."""
        self._jobs.append(job)
        self._settle()

    def asked(self) -> float:
        """Return the compute that jobs ask for, at most all that there is."""
        return min(self._machine.rate, sum(job.compute for job in self._jobs))

    def seconds_to_end(self) -> float:
        """Return the seconds until the first job ends; infinity if none runs."""
        return min((job.seconds / speed for job, speed in zip(self._jobs, self._speeds)), default=math.inf)

    def advance(self, seconds: float) -> list[str]:
        """Let time pass, and return the names of the jobs that end."""
        left = [job.seconds - seconds * speed for job, speed in zip(self._jobs, self._speeds)]
        over = [job.name for job, more in zip(self._jobs, left) if more <= _ROUNDING * job.seconds]
        self._jobs = [job._replace(seconds=more) for job, more in zip(self._jobs, left) if job.name not in over]
        if over:
            self._settle()
        return over

    def _settle(self) -> None:
        speeds = self._interference.speeds(self._jobs, self._machine.rate)
        self._speeds = [speed * self._machine.speed for speed in speeds]


_ROUNDING = 1e-9


MODELS = ("ViT-Tiny", "DeiT-Tiny", "ResNet-18", "ResNet-34", "ShuffleNet", "MobileNet")
LOWEST, HIGHEST = 0.22, 0.50
"""Range of the utilization of an A100 by one training alone."""

BATCHES = (64, 128, 256, 512)
MEMORY = 40.0
"""GB of an A100."""

SECONDS = 126 * 60 * 4 / 384
"""Mean seconds of a job alone on an A100. 384 jobs took 2.1 h on four GPUs, one job at a time on each."""

NEIGHBOUR = 0.06
"""A neighbor slows a job by a share between 0 and this, drawn for each pair of kinds."""

ROOM = 3.95 / 2.65
"""Room for compute of a GPU in the second system, relative to the first: the ratio of their gains from packing."""

H100_SPEED = 126 / 102
"""Speed of a job alone on an H100, relative to an A100 of the first system. The same jobs took 1.7 h and 2.1 h."""

A100_SPEED = 4 / 6 * (126 / 49.5 - H100_SPEED)
"""Speed of a job alone on an A100 of the second system. The jobs took 49.5 minutes on 4 H100 and 6 A100."""


@dataclass(frozen=True)
class Problem:
    """Jobs, and the slowdowns that they cause each other."""

    jobs: list[Job]
    interference: Interference


def problem(jobs: int, seed: int, neighbour: float = NEIGHBOUR) -> Problem:
    """Draw a grid of jobs from six models and four batch sizes, with as many learning rates as the number needs.

    Args:
        jobs: Number of jobs, a multiple of 24.
        neighbour: The largest share by which one neighbor slows a job.
    """
    rng = random.Random(seed)
    kinds = []
    for m, model in enumerate(MODELS):
        share = LOWEST + (HIGHEST - LOWEST) * m / (len(MODELS) - 1)
        slow = rng.lognormvariate(0, 0.5)
        for b, batch in enumerate(BATCHES):
            compute = min(HIGHEST, max(LOWEST, share * (0.9, 0.97, 1.03, 1.1)[b]))
            memory = (1.5, 2.5, 4.0, 7.0)[b] * (1 + m / 5)
            seconds = slow * (1.3, 1.1, 0.9, 0.8)[b] * rng.lognormvariate(0, 0.2)
            kinds.append(Job("", memory, compute, seconds, f"{model}/{batch}"))
    found = [
        kind._replace(name=f"{kind.kind}/{i}", seconds=kind.seconds * rng.lognormvariate(0, 0.05))
        for kind in kinds
        for i in range(jobs // len(kinds))
    ]
    scale = SECONDS * len(found) / sum(job.seconds for job in found)
    beside = {(a.kind, b.kind): 1 + rng.uniform(0, neighbour) for a in kinds for b in kinds}
    return Problem([job._replace(seconds=job.seconds * scale) for job in found], Interference(beside))


def a100s(count: int) -> list[Machine]:
    """Return GPUs of the first system."""
    return [Machine(f"A100-{i}", MEMORY) for i in range(count)]


def h100s_and_a100s(h100s: int, a100s: int) -> list[Machine]:
    """Return GPUs of the second system."""
    return [
        *(Machine(f"H100-{i}", 2 * MEMORY, ROOM, H100_SPEED) for i in range(h100s)),
        *(Machine(f"A100-{i}", MEMORY, ROOM, A100_SPEED) for i in range(a100s)),
    ]
