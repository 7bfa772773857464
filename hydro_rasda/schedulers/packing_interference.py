"""Packing by measured interference: by how fast jobs run together.

A share of a device says how much of it a job keeps busy. It does not say how much jobs on one device slow each other
otherwise, nor how much is lost if their shares leave a gap. This policy counts the work that a device's jobs do in a
second. It adds the job that adds most, even if shares then sum up to more than the device has. It stops when no job
would add anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from hydro_rasda.common.argument_checks import require
from hydro_rasda.schedulers.packing_policy import SLACK, Job, Placed, Room, longest_first

LOOK = 8
"""So many of the jobs that take longest are compared: more would put off long ones, and end with these alone."""

LEAST = 0.02
"""Devices with a smaller share left get no further job."""


@dataclass(frozen=True)
class Interference:
    """Slowdowns of jobs that share a device.

    If jobs together ask for more compute than a device has, all of them slow down in proportion. In addition, each
    neighbour slows a job by a factor: caches, memory bandwidth, the processor that feeds the device.

    Attributes:
        beside: By the kinds of a job and of one neighbour, the seconds of a step beside it over those alone. The
            slowdown that their shares explain is taken off; at least 1.
        otherwise: The same for two kinds that were not measured together.
    """

    beside: Mapping[tuple[str, str], float] = field(default_factory=dict)
    otherwise: float = 1.0

    def __post_init__(self) -> None:
        for kinds, factor in self.beside.items():
            require(factor >= 1, f"beside[{kinds}]", factor, "a number >= 1")
        require(self.otherwise >= 1, "otherwise", self.otherwise, "a number >= 1")

    def speeds(self, jobs: Sequence[Job], rate: float = 1.0) -> list[float]:
        """Return the speed of each job if these jobs share a device, over its speed with such a device to itself.

        Args:
            rate: Rate of the device, in reference devices.

        >>> jobs = [Job("a", 4, 0.5, 60, "cnn"), Job("b", 4, 0.75, 60, "vit")]
        >>> Interference({("cnn", "vit"): 1.25}).speeds(jobs)
        [0.64, 0.8]
        """
        crowd = max(1.0, sum(job.compute for job in jobs) / rate)
        slower = [crowd] * len(jobs)
        for i, job in enumerate(jobs):
            for j, other in enumerate(jobs):
                if i != j:
                    slower[i] *= self.beside.get((job.kind, other.kind), self.otherwise)
        return [1 / factor for factor in slower]


@dataclass(frozen=True)
class FastestTogether:
    """Give the device with most compute left the job that adds most work there, among the `LOOK` longest jobs.

    For J jobs, D devices, k jobs on each, and P jobs that start, a decision takes O(J log J + D k^2 + P (log D +
    LOOK k)). A device with too little memory for the `LOOK` longest jobs takes O(J) more. It takes no more if a device
    with as much left found nothing before.

    >>> jobs = [Job("a", 4, 0.7, 60), Job("b", 4, 0.7, 30)]
    >>> FastestTogether()(jobs, [Room("cuda:0", 40, 1)])
    [Placed(job='a', device='cuda:0'), Placed(job='b', device='cuda:0')]
    """

    interference: Interference = field(default_factory=Interference)

    def __call__(self, jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
        waiting = longest_first(jobs)
        waiting.reverse()  # the next ones last, where they are cheap to take out
        heap = [(-room.compute, i) for i, room in enumerate(rooms)]
        heapify(heap)
        together = [_Together(self.interference, room) for room in rooms]
        too_little = -math.inf
        placed = []
        while heap and waiting:
            used, at = heap[0]
            device = together[at]
            least = LEAST * device.rate
            if device.memory <= too_little or -used < least:
                heappop(heap)
                continue
            taken, work = device.best(waiting)
            if taken is None:
                too_little = device.memory
            # What hardly computes adds little anywhere: nothing would ever start it.
            if taken is None or work - device.work < min(least, waiting[taken].compute / 2):
                heappop(heap)
                continue
            job = waiting.pop(taken)
            device.add(job, work)
            heapreplace(heap, (used + job.compute, at))
            placed.append(Placed(job.name, rooms[at].device))
        return placed


class _Together:
    """The jobs of a device.

    Attributes:
        memory: That is left.
        work: That they do there in a second, in what a reference device does.
    """

    __slots__ = ("_beside", "_by_shares_alone", "_load", "_members", "_otherwise", "memory", "rate", "work")

    def __init__(self, interference: Interference, room: Room) -> None:
        self.rate, self.memory = room.rate, room.memory + SLACK
        self._beside, self._otherwise = interference.beside, interference.otherwise
        self._by_shares_alone = not self._beside and self._otherwise == 1
        self._load = self.work = 0.0
        self._members: list[tuple[float, str, float]] = []  # compute, kind, by how much the others slow it
        for job in room.jobs:
            self._join(job, self._work_with(job.compute, job.kind))

    def best(self, waiting: Sequence[Job]) -> tuple[int | None, float]:
        """Return the index of the job with which the device does most work, and that work.

        The last `LOOK` jobs are compared; of equal ones, the last is taken. If the memory is too small for all of them,
        it is the last job before them that fits; None if no job does.
        """
        by_shares_alone, free, load, rate = self._by_shares_alone, self.memory, self._load, self.rate
        most, at, end = -1.0, None, len(waiting)
        for i in range(end - 1, max(-1, end - 1 - LOOK), -1):
            _, memory, compute, _, kind = waiting[i]
            if memory > free:
                continue
            work = load + compute if by_shares_alone else self._work_with(compute, kind)
            if by_shares_alone and work >= rate:
                return i, rate
            if work > most:
                most, at = work, i
        if at is None:
            at = next((i for i in range(end - 1 - LOOK, -1, -1) if waiting[i].memory <= free), None)
            most = most if at is None else self._work_with(waiting[at].compute, waiting[at].kind)
        return at, most

    def add(self, job: Job, work: float) -> None:
        """Add a job, with which the device does so much work."""
        self.memory -= job.memory
        self._join(job, work)

    def _join(self, job: Job, work: float) -> None:
        self._load += job.compute
        self.work = work
        if self._by_shares_alone:
            return
        get, otherwise = self._beside.get, self._otherwise
        slower = 1.0
        for i, (compute, kind, factor) in enumerate(self._members):
            slower *= get((job.kind, kind), otherwise)
            self._members[i] = compute, kind, factor * get((kind, job.kind), otherwise)
        self._members.append((job.compute, job.kind, slower))

    def _work_with(self, compute: float, kind: str) -> float:
        if self._by_shares_alone:
            return min(self.rate, self._load + compute)
        get, otherwise = self._beside.get, self._otherwise
        slower, work = 1.0, 0.0
        for of_member, other, factor in self._members:
            slower *= get((kind, other), otherwise)
            work += of_member / (factor * get((other, kind), otherwise))
        return (work + compute / slower) / max(1.0, (self._load + compute) / self.rate)
