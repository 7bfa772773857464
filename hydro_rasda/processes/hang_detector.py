"""Decide, by the times of similar work, how long work may be silent before it counts as hung. Needs no torch.

On Ray this module is pickled by value, see `hydro_rasda.backends.ray.elastic_trainable`.
"""

from __future__ import annotations

import math


def waited_in_vain(error: str) -> bool:
    """Return whether a rank's error only says that another rank did not respond, so that the cause lies elsewhere."""
    return any(mark in error for mark in ("gloo/", "ProcessGroupNCCL", "DistBackendError", "DistStoreError"))


class HangDetector:
    """Decide how long pieces of work of one kind may be silent, by the longest time between two reports so far.

    Args:
        silence: The event that did not happen, in words, such as "no epoch was over".
        least: Least number of seconds of silence before a piece counts as hung; None for `LEAST_S`.
        foreseen: Expected seconds until a first report, from the dry run's times; infinite if unknown.
    """

    TIMES, LEAST_S = 100, 600.0
    """A piece hangs if it is silent for `TIMES` times the longest time so far, and for at least `LEAST_S` seconds."""

    FIRST_LEAST_S = 3600.0
    """Before the first report, a piece may be silent for `TIMES` times the foreseen time, and for at least this many
    seconds, because compiling takes time."""

    def __init__(self, silence: str, least: float | None = None, foreseen: float = math.inf) -> None:
        self.silence, self.foreseen = silence, foreseen
        self.least = self.LEAST_S if least is None else least
        self.longest: float | None = None
        self.most = math.inf  # `patience` never exceeds this

    def took(self, seconds: float) -> None:
        """Note that a piece has reported, `seconds` after its last report or its start."""
        self.longest = max(self.longest or 0.0, seconds)

    @property
    def patience(self) -> float:
        """Seconds after which a silent piece is ended; infinite while nothing is known or foreseen."""
        if self.longest is None:
            return min(self.most, max(self.FIRST_LEAST_S, self.TIMES * self.foreseen))
        return min(self.most, max(self.least, self.TIMES * self.longest))

    @property
    def told(self) -> str:
        """The message about a piece of work that was ended because it hung."""
        if self.longest is None:
            known, least = f"by the dry run's times it takes {self.foreseen:.3g} s", self.FIRST_LEAST_S
        else:
            known, least = f"where none had taken longer than {self.longest:.3g} s", self.least
        waited = f"({self.TIMES} times as long, and at least {least:.0f} s, are waited for)"
        return f"it was ended as it hung: {self.silence} for {self.patience:.0f} s, {known} {waited}"
