"""Jobs that share devices in virtual time: what a packing policy makes of stated profiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydro_rasda.checks import check_function, check_is, check_number, require
from hydro_rasda.schedulers import Interference, Job, Policy, Room


@dataclass(frozen=True)
class Machine:
    """A device.

    Attributes:
        memory: In the unit of the jobs' memory.
        rate: Sum of the jobs' compute that it has room for; a reference device has 1.
        speed: How fast a job gets on that is alone there, over a reference device.
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
    """What a policy made of some jobs.

    Attributes:
        seconds: From the first start to the last end: the makespan.
        busy: Mean share of the devices' compute that was asked for while jobs waited, at most all of it; NaN where none
            did.
    """

    seconds: float
    busy: float
    ended: dict[str, float]


def simulate_packing(
    policy: Policy, jobs: Sequence[Job], machines: Sequence[Machine], interference: Interference
) -> PackingOutcome:
    """Run jobs to their end; whenever one ends, the policy decides anew.

    Args:
        interference: How they slow each other, whatever the policy knows of it.

    Raises:
        ValueError: where jobs wait that the policy does not start though all machines are idle.
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
    """A machine, and what runs there."""

    def __init__(self, machine: Machine, interference: Interference) -> None:
        self._machine, self._interference = machine, interference
        self._jobs: list[Job] = []  # with the seconds that they still take
        self._speeds: list[float] = []

    def room(self) -> Room:
        """What is left."""
        machine = self._machine
        memory = machine.memory - sum(job.memory for job in self._jobs)
        compute = machine.rate - sum(job.compute for job in self._jobs)
        return Room(machine.device, memory, compute, machine.rate, tuple(self._jobs))

    def start(self, job: Job) -> None:
        """A job runs here, too."""
        self._jobs.append(job)
        self._settle()

    def asked(self) -> float:
        """Compute that is asked for, at most all."""
        return min(self._machine.rate, sum(job.compute for job in self._jobs))

    def seconds_to_end(self) -> float:
        """Until the first job ends; inf where none runs."""
        return min((job.seconds / speed for job, speed in zip(self._jobs, self._speeds)), default=math.inf)

    def advance(self, seconds: float) -> list[str]:
        """Let time pass; names of the jobs that end."""
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
