"""Packing by measured interference: by the speed of jobs that run together.

A job's share says how much of a device the job keeps busy. It does not say how much jobs slow each other otherwise, or
how much is lost if the shares leave a gap. This policy counts the work that the jobs of a device do in a second. It
adds the job that adds most work, even if the shares then exceed the device. It stops when no job would add any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from hydro_rasda.common.argument_checks import require
from hydro_rasda.schedulers.packing_policy import SLACK, Job, Placed, Room, longest_first

LOOK = 8
"""Number of longest jobs that are compared. If more were, long jobs would be put off and be left over at the end."""

LEAST = 0.02
"""Devices with a smaller share left get no further job."""


@dataclass(frozen=True)
class Interference:
    """Slowdowns of jobs that share a device.

    If jobs together ask for more compute than a device has, all of them slow down in proportion. In addition, each
    neighbor slows a job by a factor, because of caches, memory bandwidth, and the processor that feeds the device.

    Attributes:
        beside: Maps the kinds of a job and a neighbor to the job's seconds per step beside the neighbor, relative to
            those alone, without the slowdown that their shares explain. It is at least 1.
        otherwise: The same factor for two kinds that were not measured together.
    """

    beside: Mapping[tuple[str, str], float] = field(default_factory=dict)
    otherwise: float = 1.0

    def __post_init__(self) -> None:
        for kinds, factor in self.beside.items():
            require(factor >= 1, f"beside[{kinds}]", factor, "a number >= 1")
        require(self.otherwise >= 1, "otherwise", self.otherwise, "a number >= 1")

    def speeds(self, jobs: Sequence[Job], rate: float = 1.0) -> list[float]:
        """Return the speed of each job if the jobs share a device, relative to its speed alone on such a device.

        Args:
            rate: Speed of the device, relative to the reference device.

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
    """Give the device with most free compute the job that adds most work there, among the `LOOK` longest jobs.

    Let there be J jobs, D devices, k jobs on each device, and P jobs that start. A decision takes O(J log J + D k^2 + P
    (log D + LOOK k)). A device whose memory is too small for all `LOOK` longest jobs takes O(J) more, unless a device
    with as much memory found no job before.

    >>> jobs = [Job("a", 4, 0.7, 60), Job("b", 4, 0.7, 30)]
    >>> FastestTogether()(jobs, [Room("cuda:0", 40, 1)])
    [Placed(job='a', device='cuda:0'), Placed(job='b', device='cuda:0')]
    """

    interference: Interference = field(default_factory=Interference)

    def __call__(self, jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
        waiting = longest_first(jobs)
        waiting.reverse()  # the next jobs are last, where it is cheap to remove them
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
            # A job that hardly computes adds little work anywhere. Compared with `least`, it would never start.
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
        memory: Memory that is left.
        work: Work that the jobs do there in a second, in units of what a reference device does.
    """

    __slots__ = ("_beside", "_by_shares_alone", "_load", "_members", "_otherwise", "memory", "rate", "work")

    def __init__(self, interference: Interference, room: Room) -> None:
        self.rate, self.memory = room.rate, room.memory + SLACK
        self._beside, self._otherwise = interference.beside, interference.otherwise
        self._by_shares_alone = not self._beside and self._otherwise == 1
        self._load = self.work = 0.0
        self._members: list[tuple[float, str, float]] = []  # compute, kind, factor by which other members slow it
        for job in room.jobs:
            self._join(job, self._work_with(job.compute, job.kind))

    def best(self, waiting: Sequence[Job]) -> tuple[int | None, float]:
        """Return the index of the job with which the device does most work, and that work; None if no job fits.

        The last `LOOK` jobs are compared; if several are equal, the last is taken. If none of them fits into memory,
        the last job before them that fits is taken.
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
        """Add a job; `work` is the device's work with it."""
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
