"""Virtual time: the events that are to come, in order, and readings, whose ends move as trials come and go."""

from __future__ import annotations

import heapq
import math
from typing import Literal

Kind = Literal["epoch", "reading", "failure", "repair", "patience"]

Event = tuple[float, int, Kind, int, int]
"""Time, sequence number, kind, trial (or node, or milestone), and the segment that an epoch belongs to.

"reading": an epoch's data begin to be read. Its end depends on other trials, and `SharedStorage` alone knows it.
"patience": a trial that waits at a milestone has waited its share.
"""


class Clock:
    """The time, and what happens next. Of events at the same time, the one that was planned first is first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[Event] = []
        self._sequence = 0

    def after(self, delay: float, kind: Kind, subject: int, segment: int = 0) -> None:
        """Plans an event so many seconds from now."""
        self.at(self.now + delay, kind, subject, segment)

    def at(self, time: float, kind: Kind, subject: int, segment: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._planned, (time, self._sequence, kind, subject, segment))

    def due(self) -> float:
        """When the next event is; inf where none is planned."""
        return self._planned[0][0] if self._planned else math.inf

    def advance(self) -> tuple[Kind, int, int]:
        """Goes on to the next event: its kind, subject and segment."""
        self.now, _, kind, subject, segment = heapq.heappop(self._planned)
        return kind, subject, segment


class SharedStorage:
    """The shared storage of `bandwidth` bytes per second, and the readings of trials at the moment.

    The bytes delivered to each trial that reads grow alike for all. A reading that begins when this is at b bytes is
    done when it comes to b plus its size.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._trials = 0
        self._now = 0.0
        self._delivered = 0.0
        self._until: dict[int, float] = {}
        self._order: list[tuple[float, int]] = []  # of `_until`, and readings that were stopped

    def share(self, trials: int, now: float) -> None:
        """Splits the bandwidth between so many trials from now on."""
        self._deliver(now)
        self._trials = trials

    def begin(self, trial: int, size: float, now: float) -> None:
        """A trial, one of those that share, begins to read so many bytes."""
        self._deliver(now)
        self._until[trial] = self._delivered + size
        heapq.heappush(self._order, (self._until[trial], trial))

    def stop(self, trial: int) -> None:
        """A trial reads no further, if it did."""
        self._until.pop(trial, None)

    def due(self) -> float:
        """When the next reading is done if no trial comes or goes until then; inf where none is under way."""
        while self._order and self._until.get(self._order[0][1]) != self._order[0][0]:
            heapq.heappop(self._order)
        if not self._order:
            return math.inf
        missing = self._order[0][0] - self._delivered
        return self._now + max(0.0, missing) * self._trials / self._bandwidth

    def end_next(self) -> int:
        """Ends the reading that is next, at the time that `due` tells; its trial."""
        now = self.due()
        _, trial = heapq.heappop(self._order)
        del self._until[trial]
        self._deliver(now)
        return trial

    def _deliver(self, now: float) -> None:
        if self._trials:
            self._delivered += (now - self._now) * self._bandwidth / self._trials
        self._now = now
