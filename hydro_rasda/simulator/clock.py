"""Virtual time: the events that are to come, in order."""

from __future__ import annotations

import heapq
import math
from typing import Literal

Kind = Literal["epoch", "reading", "failure", "repair", "patience"]

Event = tuple[float, int, Kind, int, int]
"""Time, sequence number, kind, trial (or node, or milestone), and the segment that an epoch belongs to. "reading" is
where an epoch's data begin to be read; when that ends depends on who else comes and goes, and `SharedStorage` alone
knows it. "patience" is where a trial that waits at a milestone has waited its share."""


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
        """Plans an event."""
        self._sequence += 1
        heapq.heappush(self._planned, (time, self._sequence, kind, subject, segment))

    def due(self) -> float:
        """When the next event is; inf where none is planned."""
        return self._planned[0][0] if self._planned else math.inf

    def advance(self) -> tuple[Kind, int, int]:
        """Goes on to the next event: its kind, subject and segment."""
        self.now, _, kind, subject, segment = heapq.heappop(self._planned)
        return kind, subject, segment
