"""The bubbles of a pipeline in virtual time, and what a sweep makes of them.

With p stages, m micro-batches and v chunks a stage, on equal stages without delay between them, a rank is idle for
(p - 1) / (v m + p - 1) of a step, under GPipe and 1F1B (v = 1) as under interleaved 1F1B: the schedules differ in where
its bubbles lie, and so in how many are too short to be worth it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hydro_rasda.checks import check_int, check_number, require
from hydro_rasda.schedulers.bubble_policy import CONTROL, SHORTEST_S

Schedule = Literal["gpipe", "1f1b", "interleaved"]

SCHEDULES = ("gpipe", "1f1b", "interleaved")
DAY = 86400.0

_Operation = tuple[bool, int, int]
"""Whether it is a forward pass, the stage (over all chunks), and the micro-batch."""


@dataclass(frozen=True)
class Pipeline:
    """A host: one rank a stage, or a chunk of each of `chunks` rounds of stages.

    Attributes:
        ranks: p.
        micro_batches: m, of a step.
        forward: Seconds of a rank for a micro-batch, over all its chunks.
        backward: Likewise.
        schedule: One of `SCHEDULES`.
        chunks: v; 1 but for "interleaved", which needs a multiple of p micro-batches.
        send: Seconds from the end of an operation on one rank to the beginning of the next on another.
        update: Seconds of the optimizer, on each rank after its last backward pass.

    Raises:
        ValueError: where one is out of range.
    """

    ranks: int
    micro_batches: int
    forward: float
    backward: float
    schedule: Schedule = "1f1b"
    chunks: int = 1
    send: float = 0.0
    update: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ranks", "micro_batches", "chunks"):
            check_int(name, getattr(self, name), at_least=1)
        for name in ("forward", "backward"):
            check_number(name, getattr(self, name), above=0.0)
        for name in ("send", "update"):
            check_number(name, getattr(self, name))
        require(self.schedule in SCHEDULES, "schedule", self.schedule, f"one of {SCHEDULES}")
        interleaved = self.schedule == "interleaved"
        require(interleaved or self.chunks == 1, "chunks", self.chunks, "1 where `schedule` is not 'interleaved'")
        divides = not interleaved or self.micro_batches % self.ranks == 0
        require(divides, "micro_batches", self.micro_batches, f"a multiple of `ranks`, {self.ranks}, to interleave")

    def order(self, rank: int) -> list[_Operation]:
        """What a rank does in a step, as `torch.distributed.pipelining` has it."""
        p, m, v = self.ranks, self.micro_batches, self.chunks
        if self.schedule == "gpipe":
            return [(is_forward, rank, i) for is_forward in (True, False) for i in range(m)]
        forwards = [(True, chunk * p + rank, i) for chunk, i in self._rounds(range(v))]
        backwards = [(False, chunk * p + rank, i) for chunk, i in self._rounds(reversed(range(v)))]
        ahead = p - rank if v == 1 else (v - 1) * p + 2 * (p - 1 - rank) + 1
        ahead = min(ahead, m * v)
        order = forwards[:ahead]
        for i, operation in enumerate(backwards):
            order += [operation, *forwards[ahead + i : ahead + i + 1]]
        return order

    def _rounds(self, chunks: Iterator[int] | range) -> list[tuple[int, int]]:
        """Micro-batches of all chunks: p of each, again and again; all of them where there is one chunk."""
        of, size = list(chunks), self.ranks if self.chunks > 1 else self.micro_batches
        firsts = range(0, self.micro_batches, size)
        return [(chunk, i) for first in firsts for chunk in of for i in range(first, first + size)]

    def waits(self) -> list[list[float]]:
        """Of a step in the middle of a training, the seconds of each wait, by rank."""
        return self._run()[0]

    def step(self) -> float:
        """Seconds of such a step."""
        return self._run()[1]

    def bubble_share(self) -> float:
        """Share of the ranks' time that they wait."""
        waits, seconds = self._run()
        return sum(map(sum, waits)) / (self.ranks * seconds)

    def _run(self, steps: int = 3) -> tuple[list[list[float]], float]:
        """The waits of the last of some steps in a row, and its length; before it, ranks have come apart as they do."""
        p, last = self.ranks, self.ranks * self.chunks - 1
        orders = [self.order(rank) for rank in range(p)]
        free, done, began = [0.0] * p, dict[tuple[int, bool, int, int], float](), list[float]()
        waits: list[list[float]] = []
        for step in range(steps):
            waits, at = [[] for _ in range(p)], [0] * p
            began.append(free[0])
            while any(at[rank] < len(orders[rank]) for rank in range(p)):
                for rank, order in enumerate(orders):
                    while at[rank] < len(order):
                        is_forward, stage, i = order[at[rank]]
                        before = self._before(is_forward, stage, i, last)
                        if before is not None and (step, *before) not in done:
                            break
                        ready = 0.0 if before is None else done[(step, *before)]
                        if before is not None and before[1] % p != rank:
                            ready += self.send
                        if ready > free[rank]:
                            waits[rank].append(ready - free[rank])
                        took = (self.forward if is_forward else self.backward) / self.chunks
                        free[rank] = done[step, is_forward, stage, i] = max(free[rank], ready) + took
                        at[rank] += 1
            free = [end + self.update for end in free]
        return waits, free[0] - began[-1]

    def _before(self, is_forward: bool, stage: int, i: int, last: int) -> _Operation | None:
        """What an operation needs; None for the first stage's forward pass."""
        if is_forward:
            return None if stage == 0 else (True, stage - 1, i)
        return (True, stage, i) if stage == last else (False, stage + 1, i)


@dataclass(frozen=True)
class Harvest:
    """What a sweep makes of a host's bubbles.

    Attributes:
        share: Of the bubbles, what guests get.
        seconds: Guests' seconds in a second of the host, over all ranks.
        epochs: Epochs of a group in a day of the host.
        days: Days of the host until the sweep is through.
    """

    share: float
    seconds: float
    epochs: float
    days: float


def harvest(
    host: Pipeline,
    rungs: Sequence[tuple[int, int]],
    *,
    width: int,
    epoch_seconds: float,
    used: float = 0.9,
    shortest: float = SHORTEST_S,
    hosts: int = 1,
) -> Harvest:
    """Run a sweep in bubbles alone; rungs wait for their last group, as those of `tune` do.

    Args:
        host: Whose bubbles they are.
        rungs: Trials that train in each, and for how many epochs each.
        width: Trials of a group.
        epoch_seconds: Of a group, on a rank that it has to itself.
        used: Share that a guest gets of an open bubble.
        shortest: Bubbles that are shorter stay closed.
        hosts: How many such hosts there are.

    Raises:
        ValueError: where a number is out of range.
    """
    check_int("width", width, at_least=1)
    check_int("hosts", hosts, at_least=1)
    check_number("epoch_seconds", epoch_seconds, above=0.0)
    require(0 < used <= 1, "used", used, "in (0, 1]")
    waits, step = host.waits(), host.step()
    open_share = used * (1 - 1 / CONTROL)
    rates = [open_share * sum(wait for wait in of if wait >= shortest) / step for of in waits] * hosts
    total, idle = sum(rates), hosts * sum(map(sum, waits)) / step
    if total == 0:
        return Harvest(0.0, 0.0, 0.0, float("inf"))
    seconds = sum(_makespan(rates, -(-trials // width), epochs * epoch_seconds) for trials, epochs in rungs)
    return Harvest(total / idle, total, total * DAY / epoch_seconds, seconds / DAY)


def _makespan(rates: Sequence[float], groups: int, seconds: float) -> float:
    """Seconds until groups of equal length are through, each on the rank that is through with it first."""
    ends = [(seconds / rate, rate) for rate in rates if rate > 0]
    heapq.heapify(ends)
    end = 0.0
    for _ in range(groups):
        at, rate = ends[0]
        end = max(end, at)
        heapq.heapreplace(ends, (at + seconds / rate, rate))
    return end
