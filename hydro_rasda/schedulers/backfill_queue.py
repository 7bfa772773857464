"""Choose the next trial to start, when trials of several sizes wait for the same workers.

Trials that survived more milestones start first, new ones last. If the first in line needs more workers than are free,
workers are kept for it. Others start only if that does not delay it ("EASY" backfill: Lifka, "The ANL/IBM SP scheduling
system", 1995). After `patience` starts of others, the longest waiting trial becomes the first in line, so that new
trials are not shut out.

Workers are interchangeable here: a trial's workers may sit on several nodes. `worker_slots` counts them.

`Queue` and `Held` are kept from one decision to the next. The time of a decision grows with the workers that the first
in line lacks and with the different sizes that wait, not with the number of trials.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hydro_rasda.common.argument_checks import is_number, require


class Waiting(NamedTuple):
    """A trial that waits to start or to go on.

    Attributes:
        rung: Milestones that it survived; 0 for a new trial.
        seconds: Expected time from its start until it gives its workers back; inf where unknown.
    """

    trial: str
    workers: int
    rung: int = 0
    seconds: float = math.inf


@dataclass
class _Alike:
    """Trials of one rung and size: their places in the queue and their expected seconds, each rising."""

    places: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Queue:
    """The trials that wait, in order of arrival.

    Args:
        overtaken: Starts since the longest waiting trial was last the one that started.
    """

    def __init__(self, waiting: Iterable[Waiting] = (), overtaken: int = 0) -> None:
        self.overtaken = overtaken
        self._places: dict[str, int] = {}
        self._at: dict[int, Waiting] = {}
        self._order: list[int] = []  # all places, rising
        self._alike: dict[int, dict[int, _Alike]] = {}  # by rung and workers
        self._next = 0
        for trial in waiting:
            self.add(trial)

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[Waiting]:
        return (self._at[place] for place in self._order)

    @property
    def fewest(self) -> int:
        """Workers of the smallest trial; there must be one."""
        return min(map(min, self._alike.values()))

    def add(self, trial: Waiting, place: int | None = None) -> None:
        """One more trial.

        Args:
            place: A free one; the lower, the longer it counts as having waited. None for behind all others.
        """
        place = self._next if place is None else place
        self._next = max(self._next, place + 1)
        self._places[trial.trial] = place
        self._at[place] = trial
        insort(self._order, place)
        alike = self._alike.setdefault(trial.rung, {}).setdefault(trial.workers, _Alike())
        insort(alike.places, place)
        insort(alike.seconds, trial.seconds)

    def remove(self, name: str) -> None:
        place = self._places.pop(name)
        trial = self._at.pop(place)
        del self._order[bisect_left(self._order, place)]
        sizes = self._alike[trial.rung]
        alike = sizes[trial.workers]
        del alike.places[bisect_left(alike.places, place)]
        del alike.seconds[bisect_left(alike.seconds, trial.seconds)]
        if not alike.places:
            del sizes[trial.workers]
        if not sizes:
            del self._alike[trial.rung]

    def start(self, name: str) -> None:
        """Takes out a trial that starts, and counts whether it overtook the longest waiting one."""
        self.overtaken = 0 if self._places[name] == self._order[0] else self.overtaken + 1
        self.remove(name)

    def longest_waiting(self) -> Waiting:
        """The first to arrive; there must be one."""
        return self._at[self._order[0]]

    def deepest(self) -> Waiting:
        """Return the first to arrive of the trials that survived most milestones; there must be one."""
        sizes = self._alike[max(self._alike)]
        return self._at[min(alike.places[0] for alike in sizes.values())]

    def backfill(self, head: str, free: int, spare: int, shadow: float) -> Waiting | None:
        """The first in line that fits and does not delay the head of the line.

        Args:
            head: The trial that free workers are kept for.
            free: Workers that no trial holds.
            spare: Workers that are left over once the head starts: a trial that needs no more never delays it.
            shadow: Seconds until the head can start: a trial that ends before does not delay it either.
        """
        for rung in sorted(self._alike, reverse=True):
            sizes = self._alike[rung].items()
            first = [self._first(alike, head, size <= spare, shadow) for size, alike in sizes if size <= free]
            places = [place for place in first if place is not None]
            if places:
                return self._at[min(places)]
        return None

    def _first(self, alike: _Alike, head: str, fits_beside: bool, shadow: float) -> int | None:
        if not fits_beside and alike.seconds[0] >= shadow:
            return None
        for place in alike.places:
            waiting = self._at[place]
            if (fits_beside or waiting.seconds < shadow) and waiting.trial != head:
                return place
        return None


class Held:
    """The workers that trials hold, and when they are expected back.

    Args:
        holding: The arguments of `add` for each trial, in the order in which trials started.

    Attributes:
        workers: Held by all trials together.
    """

    def __init__(self, holding: Iterable[tuple[str, int, float]] = ()) -> None:
        # By trial: until, order of start, workers.
        self._entries = {trial: (until, i, workers) for i, (trial, workers, until) in enumerate(holding, start=1)}
        self._started = len(self._entries)
        self._ending = sorted(self._entries.values())
        self._overdue: list[tuple[int, int]] = []  # order of start, workers
        self._overdue_at = -math.inf
        self._sizes = Counter(workers for _, _, workers in self._ending)
        self.workers = sum(workers for _, _, workers in self._ending)

    def add(self, trial: str, workers: int, until: float = math.inf) -> None:
        """A trial holds workers from now on.

        Args:
            until: When it is expected to give them back, on the clock of `reservation`; inf where unknown.
        """
        self._started += 1
        self._insert(trial, (until, self._started, workers))
        self.workers += workers
        self._sizes[workers] += 1

    def remove(self, trial: str) -> None:
        workers = self._extract(trial)[2]
        self.workers -= workers
        self._sizes[workers] -= 1

    def expect(self, trial: str, until: float) -> None:
        """A trial holds its workers until another time than it was expected to."""
        _, started, workers = self._extract(trial)
        self._insert(trial, (until, started, workers))

    def reservation(self, missing: int, now: float = 0.0) -> tuple[float, int]:
        """Seconds until `missing` more workers are free, and how many the first in line then leaves over.

        Args:
            missing: At most as many as are held.
            now: The time, which must not run backwards.
        """
        self._fall_due(now)
        freed = 0
        for _, workers in self._overdue:
            freed += workers
            if freed >= missing:
                return 0.0, freed - missing
        for until, _, workers in self._ending:
            freed += workers
            if freed >= missing:
                if until < math.inf:
                    return until - now, freed - missing
                break
        return 0.0, _surely_freed(self._sizes, missing) - missing

    def _fall_due(self, now: float) -> None:
        """Trials that should have ended by now are expected to end at once, in the order in which they started."""
        self._overdue_at = now
        if self._ending and self._ending[0][0] <= now:
            due = bisect_right(self._ending, (now, math.inf))
            for _, started, workers in self._ending[:due]:
                insort(self._overdue, (started, workers))
            del self._ending[:due]

    def _insert(self, trial: str, entry: tuple[float, int, int]) -> None:
        self._entries[trial] = entry
        if entry[0] <= self._overdue_at:
            insort(self._overdue, entry[1:])
        else:
            insort(self._ending, entry)

    def _extract(self, trial: str) -> tuple[float, int, int]:
        entry = self._entries.pop(trial)
        if entry[0] <= self._overdue_at:
            del self._overdue[bisect_left(self._overdue, entry[1:])]
        else:
            del self._ending[bisect_left(self._ending, entry)]
        return entry


class Placement(NamedTuple):
    """One decision.

    Attributes:
        start: The trial to start now with its workers; None where all have to wait.
        reserved: The trial that free workers are kept for; None where none are.
    """

    start: Waiting | None = None
    reserved: Waiting | None = None


def place(queue: Queue, held: Held, free: int, patience: int = 8, now: float = 0.0) -> Placement:
    """Decide which trial starts next; `queue.start` it, `held.add` it, and ask again until `start` is None.

    A trial that is to start with more workers than there are, free and held, starts with all of them.

    Args:
        patience: After so many starts of trials that waited less, the longest waiting one is next.
        now: The time, on the clock of `held`.

    >>> queue, held = Queue([Waiting("new", 1), Waiting("promoted", 4, rung=2)]), Held()
    >>> place(queue, held, free=8).start.trial
    'promoted'
    >>> held.add("running", 6)
    >>> place(queue, held, free=2)
    Placement(start=Waiting(trial='new', ...), reserved=Waiting(trial='promoted', ...))
    """
    require(free >= 0, "free", free, "an integer >= 0")
    require(patience >= 1, "patience", patience, "an integer >= 1")
    if not queue:
        return Placement()
    head = queue.longest_waiting() if queue.overtaken >= patience else queue.deepest()
    capacity = free + held.workers
    if head.workers > capacity:
        head = head._replace(workers=capacity)
    if free == 0:
        return Placement(None, head)
    if head.workers <= free:
        return Placement(head)
    shadow, spare = held.reservation(head.workers - free, now)
    return Placement(queue.backfill(head.trial, free, spare, shadow), head)


def worker_slots(nodes: Iterable[Mapping[str, float]], worker: Mapping[str, float]) -> int:
    """Workers that fit on a cluster; one worker never spans two nodes.

    >>> worker_slots([{"CPU": 8}, {"CPU": 4}], {"CPU": 3})
    3
    """
    mapping = isinstance(worker, Mapping) and all(isinstance(name, str) for name in worker)
    fair = mapping and all(is_number(amount) and amount >= 0 for amount in worker.values())
    require(fair, "resources_per_worker", worker, "a mapping of resources' names to finite amounts >= 0")
    needs = {name: amount for name, amount in worker.items() if amount > 0}
    require(bool(needs), "resources_per_worker", dict(worker), "more than 0 of some resource")
    # The small surplus forgives 0.1 + 0.2 in fractional GPUs.
    return sum(min(int(node.get(name, 0) / amount + 1e-9) for name, amount in needs.items()) for node in nodes)


def _surely_freed(sizes: Mapping[int, int], missing: int) -> int:
    """The least that can be free once `missing` is, whatever the order in which trials of these sizes end."""
    held = [size for size, count in sizes.items() if size and count]
    bound = missing + max(held, default=0)
    sums = 1  # bit n: some of the trials hold n workers together
    for size in held:
        for _ in range(min(sizes[size], -(-bound // size))):
            sums |= sums << size & ((1 << bound + 1) - 1)
    enough = sums >> missing
    return missing + (enough & -enough).bit_length() - 1 if enough else missing
