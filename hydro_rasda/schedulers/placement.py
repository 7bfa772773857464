"""Who starts next, when trials of several sizes wait for the same workers.

Promoted trials go before new ones, the deepest rung first. The first in line gets a reservation while it is
too large for the free workers; behind it smaller ones start where they delay it by nothing ("EASY"
backfill: Lifka, "The ANL/IBM SP scheduling system", 1995). After ``patience`` starts out of turn the
longest waiting trial becomes first in line, so that new trials are not shut out either.

Workers are interchangeable here: a trial's workers may sit on several nodes. :func:`worker_slots` counts
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hydro_rasda.checks import check_int


@dataclass(frozen=True)
class Waiting:
    """A trial that waits to start or to go on.

    Attributes:
        trial: Its name.
        workers: Workers that it is due.
        rung: Milestones that it survived; 0 for a new trial.
        seconds: Expected time from its start until it gives its workers back; inf where unknown.
    """

    trial: str
    workers: int
    rung: int = 0
    seconds: float = math.inf


@dataclass(frozen=True)
class Running:
    """A trial that holds workers.

    Attributes:
        workers: Workers that it holds.
        seconds: Expected time until it gives them back; inf where unknown.
    """

    workers: int
    seconds: float = math.inf


@dataclass(frozen=True)
class Queue:
    """The trials that wait, in order of arrival.

    Attributes:
        waiting: The trials.
        overtaken: Starts since the longest waiting trial was last the one that started.
    """

    waiting: tuple[Waiting, ...] = ()
    overtaken: int = 0

    def add(self, trial: Waiting) -> Queue:
        """This queue with one more trial at its end."""
        return Queue((*self.waiting, trial), self.overtaken)

    def remove(self, trial: str) -> Queue:
        """This queue without a trial that waits no longer."""
        return Queue(tuple(w for w in self.waiting if w.trial != trial), self.overtaken)


@dataclass(frozen=True)
class Placement:
    """One decision.

    Attributes:
        start: The trial to start now with its workers; None where all have to wait.
        reserved: The trial that free workers are kept for; None where none are.
    """

    start: Waiting | None = None
    reserved: Waiting | None = None


def place(queue: Queue, running: Iterable[Running], free: int, patience: int = 8) -> tuple[Queue, Placement]:
    """Decides which trial starts next; call it again with what is left until ``start`` is None.

    A trial that is due more workers than there are, free and held, is given all there are.

    Args:
        queue: Who waits; left as it is.
        running: Who holds workers.
        free: Workers that nobody holds.
        patience: Starts out of turn before the longest waiting trial comes first.

    Returns:
        The queue without the trial that starts, and the decision.

    Raises:
        ValueError: ``free`` is negative or ``patience`` below 1.

    >>> queue = Queue((Waiting("new", 1), Waiting("promoted", 4, rung=2)))
    >>> place(queue, [Running(6)], free=2)[1].start, place(queue, [], free=8)[1].start.trial
    (Waiting(trial='new', workers=1, rung=0, seconds=inf), 'promoted')
    """
    check_int("free", free, at_least=0)
    check_int("patience", patience, at_least=1)
    held = tuple(running)
    if not queue.waiting:
        return queue, Placement()
    head, *others = _line(queue, patience)
    capacity = free + sum(r.workers for r in held)
    if head.workers > capacity:
        head = replace(head, workers=capacity)
    if free == 0:
        return queue, Placement(None, head)
    if head.workers <= free:
        return _started(queue, head), Placement(head)
    shadow, spare = _reservation(head.workers - free, held)
    for other in others:
        if other.workers <= free and (other.workers <= spare or other.seconds < shadow):
            return _started(queue, other), Placement(other, head)
    return queue, Placement(None, head)


def worker_slots(nodes: Iterable[Mapping[str, float]], worker: Mapping[str, float]) -> int:
    """Workers that fit on a cluster; one worker never spans two nodes.

    Args:
        nodes: Resources of each node, by name.
        worker: Resources of one worker.

    >>> worker_slots([{"CPU": 8}, {"CPU": 4}], {"CPU": 3})
    3
    """
    needs = {name: amount for name, amount in worker.items() if amount > 0}
    if not needs:
        raise ValueError(f"`resources_per_worker` is {dict(worker)}, but must ask for some resource")
    # The small surplus forgives 0.1 + 0.2 in fractional GPUs.
    return sum(min(int(node.get(name, 0) / amount + 1e-9) for name, amount in needs.items()) for node in nodes)


def _line(queue: Queue, patience: int) -> list[Waiting]:
    line = sorted(queue.waiting, key=lambda w: -w.rung)
    if queue.overtaken >= patience:
        line.remove(queue.waiting[0])
        line.insert(0, queue.waiting[0])
    return line


def _started(queue: Queue, started: Waiting) -> Queue:
    in_turn = queue.waiting[0].trial == started.trial
    return Queue(queue.remove(started.trial).waiting, 0 if in_turn else queue.overtaken + 1)


def _reservation(missing: int, held: Sequence[Running]) -> tuple[float, int]:
    """Seconds until ``missing`` more workers are free, and how many the first in line then leaves over."""
    freed = 0
    for running in sorted(held, key=lambda r: r.seconds):
        freed += running.workers
        if freed >= missing:
            if math.isfinite(running.seconds):
                return running.seconds, freed - missing
            break
    return 0.0, _surely_freed([r.workers for r in held], missing) - missing


def _surely_freed(sizes: Sequence[int], missing: int) -> int:
    """The least that can be free once ``missing`` is, whatever the order in which trials end."""
    sums = {0}
    for size in sizes:
        sums |= {min(total + size, missing + max(sizes)) for total in sums}
    return min((total for total in sums if total >= missing), default=missing)
