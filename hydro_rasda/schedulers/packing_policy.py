"""HyperSack's policies for jobs that share devices, under limits of memory and compute.

Alnaasan et al., "HyperSack: Distributed Hyperparameter Optimization for Deep Learning using Resource-Aware Scheduling
on Heterogeneous GPU Systems" (HiPC 2024). A single job keeps only a share of a device busy. So several jobs run on it
at the same time, as many as its memory and compute have room for. A decision takes jobs off a queue until nothing fits.
The next decision is made when a job ends.

Compute is measured in reference devices: a job needs a share of a reference device, and each device has a measured rate
relative to it. So the same policies work for unequal devices.

Let there be J jobs, D devices and P jobs that find room. A decision takes O(J log J) to sort, if the policy sorts. A
job is not tried if a smaller job has found no room. Under first fit, any other job looks at up to D devices. Under
worst fit, placing takes O(J log J + P log D), unless devices with much free compute often lack memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import NamedTuple

MARGIN = 1.1
"""Factor by which the measured memory and share of a job are raised, for safety."""

GUESS = 1.5
"""A job of an unmeasured kind is expected to need `GUESS` times the largest measurement of other kinds."""

ENOUGH, GAP = 0.5, 0.2
"""Under `worst_fit_overcommitted`, a job starts if `ENOUGH` of its share is free, or `GAP` of a reference device.

In virtual time (`benchmarks/packing_virtual.py`), a smaller `ENOUGH` takes up to 2 % less time. But if neighbors slow
each other by up to 30 %, it takes up to 4 % more time.
"""

SLACK = 1e-9
"""Tolerated rounding error of memory and compute, so that shares of 0.1, 0.2 and 0.7 fit on one device."""


class Job(NamedTuple):
    """Work that shares devices with other work.

    Attributes:
        memory: Peak memory, in the unit of the devices' memory.
        compute: Share of a reference device that the job keeps busy when it runs alone.
        seconds: Seconds that the job still takes if it runs alone on a reference device.
        kind: The kind of `packing.Task`; the policies here do not read it.
    """

    name: str
    memory: float
    compute: float
    seconds: float
    kind: str = ""


class Room(NamedTuple):
    """The free part of a device.

    Attributes:
        memory: Free memory, in the unit of the jobs' memory.
        compute: Free compute, in reference devices: 1 for a device with a rate of 2 that is half in use.
        rate: Compute of the whole device, in reference devices. The policies here do not read it.
        jobs: The jobs that run there, each with the seconds that it still takes.
    """

    device: str
    memory: float
    compute: float
    rate: float = 1.0
    jobs: tuple[Job, ...] = ()


class Placed(NamedTuple):
    """A job, and the device on which it starts."""

    job: str
    device: str


Policy = Callable[[Sequence[Job], Sequence[Room]], list[Placed]]
"""Decides which jobs start and where; the other jobs wait until a job ends."""


def first_fit(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """FF: put each job, in order of arrival, on the first device that has room for it.

    >>> first_fit([Job("a", 4, 0.5, 60), Job("b", 4, 0.6, 30)], [Room("cuda:0", 40, 1), Room("cuda:1", 40, 1)])
    [Placed(job='a', device='cuda:0'), Placed(job='b', device='cuda:1')]
    """
    free = [[room.memory + SLACK, room.compute + SLACK] for room in rooms]
    refused = _Refused()
    placed = []
    for name, memory, compute, *_ in jobs:
        if refused.knows(memory, compute):
            continue
        at = next((i for i, left in enumerate(free) if memory <= left[0] and compute <= left[1]), None)
        if at is None:
            refused.add(memory, compute)
        else:
            free[at][0] -= memory
            free[at][1] -= compute
            placed.append(Placed(name, rooms[at].device))
    return placed


def first_fit_decreasing(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """FFD: `first_fit` with the longest jobs first."""
    return first_fit(longest_first(jobs), rooms)


def worst_fit(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """WF: put each job, in order of arrival, on the device with most free compute that has room for it.

    Args:
        rooms: The free part of each device. If several are equal, the first is taken.

    >>> jobs = [Job("a", 4, 0.5, 60), Job("b", 4, 0.4, 30), Job("c", 4, 0.3, 30)]
    >>> worst_fit(jobs, [Room("cuda:0", 40, 1), Room("cuda:1", 40, 1)])
    [Placed(job='a', device='cuda:0'), Placed(job='b', device='cuda:1'), Placed(job='c', device='cuda:1')]
    """
    return _worst_fit(jobs, rooms)


def worst_fit_decreasing(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """WFD: `worst_fit` with the longest jobs first. It is HyperSack's best policy."""
    return worst_fit(longest_first(jobs), rooms)


def worst_fit_overcommitted(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """Fill the gaps of `worst_fit_decreasing`: a job also starts where `ENOUGH` of its share is free, or `GAP`.

    The jobs on such a device get slower, but no part of the device is idle.

    >>> jobs = [Job("a", 4, 0.7, 60), Job("b", 4, 0.6, 30), Job("c", 4, 0.1, 20)]
    >>> worst_fit_overcommitted(jobs, [Room("cuda:0", 40, 1)])
    [Placed(job='a', device='cuda:0'), Placed(job='b', device='cuda:0')]
    """
    return _worst_fit(longest_first(jobs), rooms, needed_of)


def needed_of(compute: float) -> float:
    """Return the compute that must be free before a job of this share starts under `worst_fit_overcommitted`."""
    return min(ENOUGH * compute, GAP)


def _worst_fit(jobs: Sequence[Job], rooms: Sequence[Room], needed_of: Callable[[float], float] = float) -> list[Placed]:
    """Place jobs as `worst_fit` does; a device has room for a job of share `s` if compute of `needed_of(s)` is free."""
    if not rooms:
        return []
    heap = [(-room.compute - SLACK, i, room.memory + SLACK) for i, room in enumerate(rooms)]
    heapify(heap)
    refused = _Refused()
    placed = []
    for name, memory, compute, *_ in jobs:
        used, at, free = heap[0]
        needed = needed_of(compute)
        if needed > -used:
            continue
        if memory <= free:
            heapreplace(heap, (used + compute, at, free - memory))
        elif refused.knows(memory, needed):
            continue
        else:
            found = _emptiest(heap, memory, needed)
            if found is None:
                refused.add(memory, needed)
                continue
            used, at, free = found
            heappush(heap, (used + compute, at, free - memory))
        placed.append(Placed(name, rooms[at].device))
    return placed


def one_a_device(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """Do not pack: put each job, in order of arrival, on the first idle device that has enough memory."""
    whole = [job._replace(compute=1.0) for job in jobs]
    return first_fit(whole, [room._replace(compute=0.0 if room.jobs else 1.0) for room in rooms])


def beside(jobs: Sequence[Job], room: Room) -> list[str]:
    """Return the names of the jobs that start on one device: those that find room, in their order.

    If nothing runs there, at least the first job starts. So a job that is larger than the device runs alone there,
    instead of never starting.

    >>> beside([Job("a", 30, 1, 0), Job("b", 30, 1, 0), Job("c", 10, 1, 0)], Room("cpu", 40, 2))
    ['a', 'c']
    >>> beside([Job("a", 50, 1, 0)], Room("cpu", 40, 2))
    ['a']
    """
    placed = [job for job, _ in first_fit(jobs, [room])]
    return placed or [job.name for job in jobs[: 0 if room.jobs else 1]]


def longest_first(jobs: Iterable[Job]) -> list[Job]:
    """Return jobs by their seconds, longest first; equally long jobs keep their order."""
    return sorted(jobs, key=attrgetter("seconds"), reverse=True)


def _emptiest(heap: list[tuple[float, int, float]], memory: float, compute: float) -> tuple[float, int, float] | None:
    """Remove from a heap, and return, the device with most free compute among those with enough memory.

    Return None if no device has enough memory and compute. An entry of the heap is a device's free compute (negated),
    its index and its free memory.
    """
    aside = []
    found = None
    while heap and -heap[0][0] >= compute:
        device = heappop(heap)
        if device[2] >= memory:
            found = device
            break
        aside.append(device)
    for device in aside:
        heappush(heap, device)
    return found


class _Refused:
    """Sizes of jobs that found no room.

    During a decision, rooms only shrink. So a job that needs at least as much will not find room either.
    """

    def __init__(self) -> None:
        # `_memory[i]` and `_compute[i]` belong to the same job. As i rises, memory rises and compute falls.
        self._memory: list[float] = []
        self._compute: list[float] = []

    def knows(self, memory: float, compute: float) -> bool:
        """Tell whether an equal or smaller job has already found no room."""
        at = bisect_right(self._memory, memory)
        return at > 0 and self._compute[at - 1] <= compute

    def add(self, memory: float, compute: float) -> None:
        """Add a job's size; `knows` must be False for it."""
        start = end = bisect_left(self._memory, memory)
        while end < len(self._memory) and self._compute[end] >= compute:
            end += 1
        self._memory[start:end] = [memory]
        self._compute[start:end] = [compute]
