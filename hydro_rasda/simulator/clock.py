"""Virtual time: the queue of future events, and the readings of data, whose ends move when trials start or stop."""

from __future__ import annotations

import heapq
import math
from typing import Literal

Kind = Literal["epoch", "reading", "failure", "repair", "patience"]

Event = tuple[float, int, Kind, int, int]
"""An event: time, sequence number, kind, subject (a trial, node or milestone), and segment.

The segment counts the periods in which a trial had workers. An event with an earlier segment than its trial is void.

"reading": the reading of an epoch's data begins. Its end cannot be planned, because it depends on other trials; see
`SharedStorage`. "patience": a trial at a milestone has reached its longest wait.
"""


class Clock:
    """The current time and the future events. Events at the same time come in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[Event] = []
        self._sequence = 0

    def after(self, delay: float, kind: Kind, subject: int, segment: int = 0) -> None:
        """Plan an event `delay` seconds from now; `subject` is its trial, node or milestone (see `Event`)."""
        self.at(self.now + delay, kind, subject, segment)

    def at(self, time: float, kind: Kind, subject: int, segment: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._planned, (time, self._sequence, kind, subject, segment))

    def due(self) -> float:
        """Return the time of the next event; inf if none is planned."""
        return self._planned[0][0] if self._planned else math.inf

    def advance(self) -> tuple[Kind, int, int]:
        """Advance the time to the next event; return its kind, subject and segment."""
        self.now, _, kind, subject, segment = heapq.heappop(self._planned)
        return kind, subject, segment


class SharedStorage:
    """Shared storage that delivers `bandwidth` bytes per second, and the trials that read from it now.

    Each trial gets the same number of bytes per second, and `_delivered` sums them up for one trial. If the sum is b
    when a reading begins, the reading ends when the sum reaches b plus the size of the reading.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._trials = 0
        self._now = 0.0
        self._delivered = 0.0
        self._until: dict[int, float] = {}
        self._order: list[tuple[float, int]] = []  # heap of `_until`; stopped readings may remain in it

    def share(self, trials: int, now: float) -> None:
        """Split the bandwidth between this number of trials from now on."""
        self._deliver(now)
        self._trials = trials

    def begin(self, trial: int, size: float, now: float) -> None:
        """Let a trial begin to read `size` bytes. It must be one of the trials that share the bandwidth."""
        self._deliver(now)
        self._until[trial] = self._delivered + size
        heapq.heappush(self._order, (self._until[trial], trial))

    def stop(self, trial: int) -> None:
        """Stop the reading of a trial, if there is one."""
        self._until.pop(trial, None)

    def due(self) -> float:
        """Return the time at which the next reading ends if no trial starts or stops; inf if nothing is read."""
        while self._order and self._until.get(self._order[0][1]) != self._order[0][0]:
            heapq.heappop(self._order)
        if not self._order:
            return math.inf
        missing = self._order[0][0] - self._delivered
        return self._now + max(0.0, missing) * self._trials / self._bandwidth

    def end_next(self) -> int:
        """End the next reading at the time that `due` returns, and return its trial."""
        now = self.due()
        _, trial = heapq.heappop(self._order)
        del self._until[trial]
        self._deliver(now)
        return trial

    def _deliver(self, now: float) -> None:
        if self._trials:
            self._delivered += (now - self._now) * self._bandwidth / self._trials
        self._now = now
