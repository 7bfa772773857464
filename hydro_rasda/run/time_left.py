"""How long a run still takes: planned epochs times seconds an epoch, foreseen at first, then measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

PRIOR = 0.1
"""Share of a stage by which its foreseen times count for as much as the measured ones."""

OVERHEAD = 2.0
"""Measured over foreseen time where nothing was measured: validation, updates and checkpoints were not foreseen."""

SMOOTHING = 0.1
"""Share of the time left within which the estimate comes to a new value, so that it does not jump."""

LEAST_SMOOTHING = 1.0
"""The same in seconds, at least."""


class Piece(NamedTuple):
    """Epochs of a stage that cost alike.

    Attributes:
        epochs: How many, over all trials.
        seconds: Foreseen wall time of one of them; NaN where that is not known.
    """

    epochs: float
    seconds: float


@dataclass
class _Stage:
    pieces: list[Piece]
    foreseen: float = 0.0
    spent: float = 0.0
    trained: float = 0.0

    def take(self, epochs: float) -> None:
        """Count epochs as trained, from the first pieces."""
        self.trained += epochs
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
        """Foreseen seconds of its pieces; not finite where nothing was foreseen."""
        return sum(count * seconds for count, seconds in self.pieces)

    def factor(self, without: float) -> float:
        """Measured over foreseen time; where little was measured, nearer to what it is `without`."""
        prior = PRIOR * (self.ahead + self.foreseen)
        return (prior * without + self.spent) / (prior + self.foreseen) if prior > 0 else without

    def left(self, without: float) -> float:
        """Seconds that its pieces take; NaN where nothing was foreseen or measured."""
        if math.isfinite(self.ahead + self.foreseen):
            return self.ahead * self.factor(without)
        count = sum(count for count, _ in self.pieces)
        return count * self.spent / self.trained if self.trained else math.nan


class TimeLeft:
    """The estimate for a whole run, over its stages.

    Attributes:
        lanes: How many models train at the same time.
    """

    def __init__(self) -> None:
        self.lanes = 1
        self._stages: dict[str, _Stage] = {}
        self._now, self._at = "", 0.0
        self._shown: tuple[float, float] | None = None

    def plan(self, stage: str, pieces: Iterable[Piece]) -> None:
        """Say what a stage has left to train; what was measured of it stays."""
        known = self._stages.setdefault(stage, _Stage([]))
        known.pieces = [piece for piece in pieces if piece.epochs > 0]

    def begin(self, stage: str, seconds: float) -> None:
        """Start the clock of a stage, at a wall time of the run."""
        self._now, self._at = stage, seconds

    def advance(self, epochs: float, seconds: float) -> None:
        """Count epochs of the stage that began last."""
        if (stage := self._stages.get(self._now)) is not None:
            stage.spent += max(0.0, seconds - self._at)
            stage.take(epochs)
        self._at = seconds

    def foreseen(self) -> float | None:
        """Seconds that all stages still take; None where that is not known of one of them."""
        factor, left = OVERHEAD, 0.0
        for stage in self._stages.values():
            left += stage.left(factor)
            # What one stage takes beside what was foreseen, the next will probably take, too.
            factor = stage.factor(factor) if 0 < stage.foreseen + stage.ahead < math.inf else factor
        return left if self._stages and math.isfinite(left) else None

    def left(self, seconds: float) -> float | None:
        """The same at a wall time of the run, smoothed: it changes little by little."""
        raw = self.foreseen()
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
