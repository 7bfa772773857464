"""An estimate of the time left of a run, from planned epochs and foreseen or measured seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

PRIOR = 0.03
"""Share of a heat after which measured times weigh as much as foreseen times."""

ENOUGH = 0.1
"""Share of a heat after which its measured times are reported, if none were foreseen."""

OVERHEAD = 1.5
"""Ratio of real to foreseen time, assumed before anything is measured. It is above 1, because the foreseen time leaves
out validation and checkpoints.

On digits, measured ratios are 1.2 to 1.6 for full-size models. For a sweep of small measured groups, they are 2.2 to
2.7, because each group waits for a process.
"""

SMOOTHING = 0.1
"""The estimate approaches a new value over this share of the time left, so that it does not jump."""

LEAST_SMOOTHING = 1.0
"""The estimate takes at least this many seconds to approach a new value."""

LEAST_TOLD = 2.0
"""Number of seconds below which the time left is not shown."""

LEAST_NEWS = 60.0
"""If fewer seconds than this are left, a part of the run begins without a line on the time left.

A dry run foresees only the time of the batches. Processes, validation and checkpoints take some tenths of a second more
for each group and full-size model. That matters in a run of seconds, but not in a run of minutes.
"""


def roughly(seconds: float) -> str:
    """Write an estimated time for people, in one unit.

    >>> [roughly(seconds) for seconds in (39.7, 689, 10_800, 200_000)]
    ['40 s', '11 min', '3 h', '2 d']
    """
    for limit, unit, size in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


class Piece(NamedTuple):
    """Epochs of a part of the run that take equally long.

    Attributes:
        epochs: Number of epochs, over all trials.
        seconds: Foreseen wall time of one epoch; NaN if it is not known.
    """

    epochs: float
    seconds: float


@dataclass
class _PartLeft:
    pieces: list[Piece]
    foreseen: float = 0.0
    spent: float = 0.0
    trained: float = 0.0
    reports: int = 0
    told: bool = False

    def take(self, epochs: float) -> None:
        """Count epochs as trained; they are taken from the first pieces."""
        self.trained += epochs
        self.reports += 1
        while epochs > 0 and self.pieces:
            count, seconds = self.pieces[0]
            now = min(count, epochs)
            self.foreseen += now * seconds
            epochs -= now
            self.pieces[0] = Piece(count - now, seconds)
            if count <= now:
                del self.pieces[0]

    @property
    def ahead(self) -> float:
        """Foreseen seconds of the remaining pieces; not finite if they were not foreseen."""
        return sum(count * seconds for count, seconds in self.pieces)

    @property
    def factor(self) -> float:
        """Return the ratio of measured to foreseen time. It is near `OVERHEAD` if little was measured."""
        prior = PRIOR * (self.ahead + self.foreseen)
        return (prior * OVERHEAD + self.spent) / (prior + self.foreseen) if prior > 0 else OVERHEAD

    @property
    def is_foreseen(self) -> bool:
        """Tell whether the time of all epochs, trained or not, was foreseen."""
        return math.isfinite(self.ahead + self.foreseen)

    @property
    def epochs(self) -> float:
        """Number of epochs that are left."""
        return sum(count for count, _ in self.pieces)

    def left(self, lanes: int) -> float:
        """Return the seconds of the remaining pieces; NaN if they are not foreseen and too few reports have come.

        `lanes` is the number of models that train at the same time. That many reports are enough.
        """
        if not self.pieces:
            return 0.0
        if self.is_foreseen:
            return self.ahead * self.factor
        return self.epochs * self.spent / self.trained if self.reports >= lanes else math.nan

    def can_be_told(self, lanes: int) -> bool:
        """Tell whether enough of the part was measured to tell a user how long the rest takes."""
        enough = self.is_foreseen or self.trained >= ENOUGH * (self.trained + self.epochs)
        return enough and self.reports >= lanes


class TimeLeft:
    """Estimate the time that a run still takes, over all its heats.

    `lanes` is the number of models that train at the same time.
    """

    def __init__(self) -> None:
        self.lanes = 1
        self._parts: dict[str, _PartLeft] = {}
        self._now, self._at = "", 0.0
        self._shown: tuple[float, float] | None = None

    def plan(self, part: str, pieces: Iterable[Piece]) -> None:
        """Set the epochs that a heat still has to train. Its measurements stay."""
        known = self._parts.setdefault(part, _PartLeft([]))
        known.pieces = [piece for piece in pieces if piece.epochs > 0]

    def planned(self, part: str) -> bool:
        return part in self._parts

    def begin(self, part: str, seconds: float) -> None:
        """Start the clock of a heat at the given wall time of the run."""
        self._now, self._at = part, seconds

    def advance(self, epochs: float, seconds: float) -> None:
        """Count epochs as trained in the heat that began last; `seconds` is the wall time of the run now."""
        if (part := self._parts.get(self._now)) is not None:
            part.spent += max(0.0, seconds - self._at)
            part.take(epochs)
        self._at = seconds

    def foreseen(self, most: float = math.inf) -> float | None:
        """Return the seconds that all heats still take, at most `most`; None if one of them is not known."""
        left = sum(part.left(self.lanes) for part in self._parts.values())
        return min(left, most) if self._parts and math.isfinite(left) else None

    def news(self, seconds: float, most: float = math.inf) -> float | None:
        """Return the seconds left if the user should be told now; otherwise None.

        The user is told once in each part, when enough is measured and at least `LEAST_NEWS` seconds are left. After
        that, `left` continues from this value.
        """
        part, left = self._parts.get(self._now), self.foreseen(most)
        if part is None or part.told or not part.can_be_told(self.lanes) or left is None or left < LEAST_NEWS:
            return None
        part.told, self._shown = True, (left, seconds)
        return left

    def left(self, seconds: float, most: float = math.inf) -> float | None:
        """Return the seconds left at a wall time of the run, smoothed so that they change little by little."""
        raw = self.foreseen(most)
        if raw is None:
            return None
        if self._shown is not None:
            before, at = self._shown
            passed = max(0.0, seconds - at)
            weight = 1 - math.exp(-passed / max(LEAST_SMOOTHING, SMOOTHING * raw))
            expected = before - passed
            raw = max(0.0, expected + weight * (raw - expected))
        self._shown = raw, seconds
        return raw
