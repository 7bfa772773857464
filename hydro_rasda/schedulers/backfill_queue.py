"""Choose the next trial to start if trials of several sizes wait for the same workers.

Trials that survived more milestones start first; new trials start last. If the first in line (the head) needs more
workers than are free, workers are reserved for it. Other trials start only if they do not delay the head ("EASY"
backfill: Lifka, "The ANL/IBM SP scheduling system", 1995). After `patience` starts of other trials, the longest waiting
trial becomes the head, so that new trials are not shut out.

Workers are interchangeable: the workers of a trial may be on several nodes. `worker_slots` counts the workers.

`Queue` and `Held` may be kept between decisions. They are sorted, so that a decision among thousands of trials takes
microseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple

from hydro_rasda.common.argument_checks import is_int, is_number, require


class Waiting(NamedTuple):
    """A trial that waits to start or to continue.

    Attributes:
        rung: Number of milestones that it survived; 0 for a new trial.
        seconds: Expected seconds from its start until it releases its workers; inf if unknown.
    """

    trial: str
    workers: int
    rung: int = 0
    seconds: float = math.inf


class Queue:
    """The waiting trials, in order of arrival.

    Args:
        overtaken: Number of trials that started in a row, none of which was the longest waiting trial.
    """

    def __init__(self, waiting: Iterable[Waiting] = (), overtaken: int = 0) -> None:
        self.overtaken = overtaken
        self._places: dict[str, int] = {}
        self._at: dict[int, Waiting] = {}
        # A place is a trial's number in the order of arrival. `_alike[-rung, workers]` has the places of all trials
        # with this rung and number of workers, in rising order.
        self._alike: dict[tuple[int, int], list[int]] = {}
        self._next = 0
        trials = [*waiting] if isinstance(waiting, Iterable) else [waiting]
        require(all(isinstance(trial, Waiting) for trial in trials), "waiting", waiting, "trials, each a `Waiting`")
        for trial in trials:
            self.add(trial)

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[Waiting]:
        return (self._at[place] for place in sorted(self._at))

    @property
    def fewest(self) -> int:
        """Number of workers that the smallest waiting trial needs. The queue must not be empty."""
        return min(workers for _, workers in self._alike)

    def add(self, trial: Waiting, place: int | None = None) -> None:
        """Add a trial that waits from now on.

        Args:
            place: The trial's place in the order of arrival, which no other trial may have. A trial with a lower place
                counts as having waited longer. With None, the new trial comes last.
        """
        place = self._next if place is None else place
        self._next = max(self._next, place + 1)
        self._places[trial.trial] = place
        self._at[place] = trial
        insort(self._alike.setdefault((-trial.rung, trial.workers), []), place)

    def remove(self, name: str) -> None:
        place = self._places.pop(name)
        trial = self._at.pop(place)
        alike = self._alike[-trial.rung, trial.workers]
        alike.remove(place)
        if not alike:
            del self._alike[-trial.rung, trial.workers]

    def start(self, name: str) -> None:
        """Remove a trial that starts; count whether it overtook the longest waiting trial."""
        self.overtaken = 0 if name == self.longest_waiting().trial else self.overtaken + 1
        self.remove(name)

    def longest_waiting(self) -> Waiting:
        """Return the waiting trial that arrived first. The queue must not be empty."""
        return self._at[min(places[0] for places in self._alike.values())]

    def deepest(self) -> Waiting:
        """Among the trials that survived most milestones, return the one that arrived first.

        The queue must not be empty.
        """
        return self._at[min((rung, places[0]) for (rung, _), places in self._alike.items())[1]]

    def backfill(self, head: str, free: int, spare: int, shadow: float) -> Waiting | None:
        """Return the first trial in line that fits `free` workers and does not delay the head; None if there is none.

        Args:
            head: The trial for which free workers are reserved.
            spare: Number of workers that remain free after the head has started. A trial with at most this number of
                workers never delays the head.
            shadow: Seconds until the head can start. A trial that ends before that does not delay the head either.
        """
        found: list[tuple[int, int]] = []
        for (rung, workers), places in self._alike.items():
            if workers <= free:
                others = ((place, self._at[place]) for place in places)
                fits = (p for p, w in others if w.trial != head and (workers <= spare or w.seconds < shadow))
                found += [(rung, place) for place in islice(fits, 1)]
        return self._at[min(found)[1]] if found else None


class Held:
    """The workers that trials hold, and when they are expected to be released.

    Args:
        holding: The arguments of `add` for each trial, in the order in which the trials started.

    Attributes:
        workers: Number of workers that all trials hold together.
    """

    def __init__(self, holding: Iterable[tuple[str, int, float]] = ()) -> None:
        self._entries: dict[str, tuple[float, int, int]] = {}  # expected time of release, order of start, workers
        self._ending: list[tuple[float, int, int]] = []  # the same tuples, sorted
        self._sizes: Counter[int] = Counter()
        self._started = self.workers = 0
        entries = [*holding] if isinstance(holding, Iterable) else [holding]
        fits = all(isinstance(each, tuple | list) and len(each) in (2, 3) and is_int(each[1]) for each in entries)
        require(fits, "holding", holding, "tuples of a trial, its workers and, if known, the time of their release")
        for each in entries:
            self.add(*each)

    def add(self, trial: str, workers: int, until: float = math.inf) -> None:
        """Note that a trial holds workers from now on.

        Args:
            until: The time at which the trial is expected to release them, on the same clock as `now` of `reservation`;
                inf if unknown.
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
        """Change the time until which a trial is expected to hold its workers."""
        _, started, workers = self._extract(trial)
        self._insert(trial, (until, started, workers))

    def reservation(self, missing: int, now: float = 0.0) -> tuple[float, int]:
        """Return the seconds until `missing` more workers are free, and the workers that the head then leaves free.

        At least `missing` workers must be held. If the time is unknown, the seconds are 0, and the second number is the
        least number of workers that can stay free.
        """
        # Trials that should have ended already are expected to end now, in the order in which they started.
        due = bisect_right(self._ending, (now, math.inf))
        overdue = sorted(self._ending[:due], key=itemgetter(1))
        freed = 0
        for until, _, workers in chain(overdue, islice(self._ending, due, None)):
            freed += workers
            if freed >= missing:
                if until < math.inf:
                    return max(0.0, until - now), freed - missing
                break
        return 0.0, _surely_freed(self._sizes, missing) - missing

    def _insert(self, trial: str, entry: tuple[float, int, int]) -> None:
        self._entries[trial] = entry
        insort(self._ending, entry)

    def _extract(self, trial: str) -> tuple[float, int, int]:
        entry = self._entries.pop(trial)
        del self._ending[bisect_left(self._ending, entry)]
        return entry


class Placement(NamedTuple):
    """A decision of `place`: the trial that starts now, and the trial for which workers are reserved.

    Attributes:
        start: The trial to start now, with its workers; None if all trials must wait.
        reserved: The trial for which free workers are reserved; None if there is none.
    """

    start: Waiting | None = None
    reserved: Waiting | None = None


def place(queue: Queue, held: Held, free: int, patience: int = 8, now: float = 0.0) -> Placement:
    """Decide which trial starts next. Then call `queue.start` and `held.add` for it, and repeat until `start` is None.

    If a trial needs more workers than exist, free and held ones together, it starts with all of them.

    Args:
        patience: After this number of starts in a row that overtook the longest waiting trial, that trial is next.
        now: The current time, on the clock of `held`.

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
    """Return the number of workers that fit on a cluster. A worker never spans two nodes.

    >>> worker_slots([{"CPU": 8}, {"CPU": 4}], {"CPU": 3})
    3
    """
    mapping = isinstance(worker, Mapping) and all(isinstance(name, str) for name in worker)
    fair = mapping and all(is_number(amount) and amount >= 0 for amount in worker.values())
    require(fair, "resources_per_worker", worker, "a mapping of resources' names to finite amounts >= 0")
    needs = {name: amount for name, amount in worker.items() if amount > 0}
    require(bool(needs), "resources_per_worker", dict(worker), "more than 0 of some resource")
    # Adding 1e-9 tolerates the rounding errors of fractional GPUs, such as 0.1 + 0.2.
    return sum(min(int(node.get(name, 0) / amount + 1e-9) for name, amount in needs.items()) for node in nodes)


def _surely_freed(sizes: Mapping[int, int], missing: int) -> int:
    """Return the least number of free workers once at least `missing` are free, for any order in which trials end.

    `sizes` maps a number of workers to the number of trials that hold it.
    """
    held = [size for size, count in sizes.items() if size and count]
    bound = missing + max(held, default=0)
    sums = 1  # bit n is set if some of the trials together hold n workers
    for size in held:
        for _ in range(min(sizes[size], -(-bound // size))):
            sums |= sums << size & ((1 << bound + 1) - 1)
    enough = sums >> missing
    return missing + (enough & -enough).bit_length() - 1 if enough else missing
