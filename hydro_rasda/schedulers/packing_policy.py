"""HyperSack's policies for jobs that share devices, under limits of memory and compute.

Alnaasan et al., "HyperSack: Distributed Hyperparameter Optimization for Deep Learning using Resource-Aware Scheduling
on Heterogeneous GPU Systems" (HiPC 2024). A job that is alone on a device keeps only a share of it busy. So as many
jobs run there at the same time as the device's memory and compute have room for. A decision takes jobs off a queue
until nothing fits. The next decision is made when a job ends.

Compute is counted in devices of one kind, the reference. A job has its share of such a device, and a device has its
measured rate. So the same policies hold for unequal devices.

Costs of a decision, for J jobs, D devices and P jobs that find room: O(J log J) to sort, if the policy sorts. If memory
or compute clearly runs out first, O(J log J + P log D) to place. In the worst case the free memory and compute lie
scattered, and a job looks at all D devices. A job that needs no less than one that found no room is not tried again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter
from typing import NamedTuple

MARGIN = 1.1
"""Jobs are given so much more memory, and so much larger a share, than were measured."""

GUESS = 1.5
"""A job of a kind that nobody has measured gets this many times the largest measurement of other kinds."""

SLACK = 1e-9
"""Forgiven of either: shares of 0.1, 0.2 and 0.7 fill a device."""


class Job(NamedTuple):
    """Work that shares devices with other work.

    Attributes:
        memory: That it needs, at its peak; in the unit of the devices' memory.
        compute: Share of a reference device that it keeps busy when it is alone there.
        seconds: That it still takes, alone on a reference device.
        kind: Jobs of one kind slow others alike, and are slowed alike.
    """

    name: str
    memory: float
    compute: float
    seconds: float
    kind: str = ""


class Room(NamedTuple):
    """The free part of a device.

    Attributes:
        memory: Free, in the unit of the jobs' memory.
        compute: Free, in reference devices: of a device with the rate 2 that is half in use, 1.
        rate: Of the whole device, while as many jobs run there as it has compute for.
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


_SECONDS = itemgetter(Job._fields.index("seconds"))
"""Of a job; three times as fast as the attribute."""

Policy = Callable[[Sequence[Job], Sequence[Room]], list[Placed]]
"""Says which jobs start where; the others wait until a job ends."""


def first_fit(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """FF: put each job, in order of arrival, on the first device that has room for it.

    >>> first_fit([Job("a", 4, 0.5, 60), Job("b", 4, 0.6, 30)], [Room("cuda:0", 40, 1), Room("cuda:1", 40, 1)])
    [Placed(job='a', device='cuda:0'), Placed(job='b', device='cuda:1')]
    """
    if not rooms:
        return []
    placed = []
    tree, refused = _Tree(rooms), _Refused()
    for name, memory, compute, *_ in jobs:
        if refused.knows(memory, compute):
            continue
        at = tree.first(memory, compute)
        if at is None:
            refused.add(memory, compute)
        else:
            tree.take(at, memory, compute)
            placed.append(Placed(name, rooms[at].device))
    return placed


def first_fit_decreasing(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """FFD: `first_fit`, the jobs that take longest first."""
    return first_fit(longest_first(jobs), rooms)


def worst_fit(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """WF: put each job, in order of arrival, on the device with most compute left that has room for it.

    Args:
        rooms: The free part of each device; of equal ones, the first is taken.

    >>> jobs = [Job("a", 4, 0.5, 60), Job("b", 4, 0.4, 30), Job("c", 4, 0.3, 30)]
    >>> worst_fit(jobs, [Room("cuda:0", 40, 1), Room("cuda:1", 40, 1)])
    [Placed(job='a', device='cuda:0'), Placed(job='b', device='cuda:1'), Placed(job='c', device='cuda:1')]
    """
    if not rooms:
        return []
    heap = [(-room.compute - SLACK, i, room.memory + SLACK) for i, room in enumerate(rooms)]
    heapify(heap)
    refused = _Refused()
    placed = []
    for name, memory, compute, *_ in jobs:
        used, at, free = heap[0]
        if compute > -used:
            continue
        if memory <= free:
            heapreplace(heap, (used + compute, at, free - memory))
        elif refused.knows(memory, compute):
            continue
        else:
            found = _emptiest(heap, memory, compute)
            if found is None:
                refused.add(memory, compute)
                continue
            used, at, free = found
            heappush(heap, (used + compute, at, free - memory))
        placed.append(Placed(name, rooms[at].device))
    return placed


def worst_fit_decreasing(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """WFD: `worst_fit`, the jobs that take longest first. HyperSack's best."""
    return worst_fit(longest_first(jobs), rooms)


def one_a_device(jobs: Sequence[Job], rooms: Sequence[Room]) -> list[Placed]:
    """As without packing: each job, as they come, on the first device that is idle and has the memory."""
    whole = [job._replace(compute=1.0) for job in jobs]
    return first_fit(whole, [room._replace(compute=0.0 if room.jobs else 1.0) for room in rooms])


def beside(jobs: Sequence[Job], room: Room) -> list[str]:
    """Choose the jobs that start on one device, in their order: those that find room.

    If nothing runs there, at least the first job starts. So a job larger than the device has it to itself, instead of
    never starting.

    >>> beside([Job("a", 30, 1, 0), Job("b", 30, 1, 0), Job("c", 10, 1, 0)], Room("cpu", 40, 2))
    ['a', 'c']
    >>> beside([Job("a", 50, 1, 0)], Room("cpu", 40, 2))
    ['a']
    """
    placed = [job for job, _ in first_fit(jobs, [room])]
    return placed or [job.name for job in jobs[: 0 if room.jobs else 1]]


def longest_first(jobs: Iterable[Job]) -> list[Job]:
    """Jobs by the seconds that they take; those that take equally long as they come."""
    return sorted(jobs, key=_SECONDS, reverse=True)


def _emptiest(heap: list[tuple[float, int, float]], memory: float, compute: float) -> tuple[float, int, float] | None:
    """Takes the device with most compute out of the heap, of those with enough memory; None where there is none."""
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
    """The jobs that found no room. As rooms only shrink, no job that needs as much of both finds room later."""

    def __init__(self) -> None:
        self._memory: list[float] = []  # rising, while the compute at the same place falls
        self._compute: list[float] = []

    def knows(self, memory: float, compute: float) -> bool:
        """Tell whether a job that needed no more found no room."""
        at = bisect_right(self._memory, memory)
        return at > 0 and self._compute[at - 1] <= compute

    def add(self, memory: float, compute: float) -> None:
        """One more; `knows` must not know it."""
        start = end = bisect_left(self._memory, memory)
        while end < len(self._memory) and self._compute[end] >= compute:
            end += 1
        self._memory[start:end] = [memory]
        self._compute[start:end] = [compute]


class _Tree:
    """Devices as the leaves of a binary tree whose nodes know the most that is left below them, of either."""

    def __init__(self, rooms: Sequence[Room]) -> None:
        self._leaves = 1 << (len(rooms) - 1).bit_length()
        missing = [-1.0] * (self._leaves - len(rooms))
        below = [0.0] * self._leaves
        self._memory = below + [room.memory + SLACK for room in rooms] + missing
        self._compute = below + [room.compute + SLACK for room in rooms] + missing
        for node in range(self._leaves - 1, 0, -1):
            self._sum_up(node)

    def first(self, memory: float, compute: float) -> int | None:
        """The first device with so much of either."""
        most_memory, most_compute, leaves = self._memory, self._compute, self._leaves
        node = 1
        while True:
            if most_memory[node] >= memory and most_compute[node] >= compute:
                if node >= leaves:
                    return node - leaves
                node *= 2
                continue
            while node & 1:  # the right child, or the root: on to what lies right of the parent
                node >>= 1
            if node == 0:
                return None
            node += 1

    def take(self, at: int, memory: float, compute: float) -> None:
        """So much of a device is used."""
        node = at + self._leaves
        self._memory[node] -= memory
        self._compute[node] -= compute
        while node := node >> 1:
            self._sum_up(node)

    def _sum_up(self, node: int) -> None:
        for most in (self._memory, self._compute):
            left, right = most[2 * node], most[2 * node + 1]
            most[node] = left if left > right else right
