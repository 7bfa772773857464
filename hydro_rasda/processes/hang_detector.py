"""How long work may be silent before it is taken to hang: judged by how long its like took. Needs no torch.

On Ray it is pickled by value, see `hydro_rasda.backends.ray.elastic_trainable`.
"""

from __future__ import annotations

import math


def waited_in_vain(error: str) -> bool:
    """Return whether an error of one of several ranks only says that another rank did not come."""
    return any(mark in error for mark in ("gloo/", "ProcessGroupNCCL", "DistBackendError", "DistStoreError"))


class HangDetector:
    """How long pieces of one kind took from one report to the next (`longest`); so how long one may be silent.

    `silence` is told in words, such as "no epoch was over". Of a first report, the dry run's times foresee the seconds.
    """

    TIMES, LEAST_S = 100, 600.0
    """A piece hangs if it reports nothing for `TIMES` the longest time so far, and for at least `LEAST_S` seconds."""

    FIRST_LEAST_S = 3600.0
    """Before any has reported, `TIMES` as long as is foreseen, and so long, are waited for: compiling takes time."""

    def __init__(self, silence: str, least: float | None = None, foreseen: float = math.inf) -> None:
        self.silence, self.foreseen = silence, foreseen
        self.least = self.LEAST_S if least is None else least
        self.longest: float | None = None
        self.most = math.inf  # seconds of silence, whatever is known

    def took(self, seconds: float) -> None:
        """One has reported, so long after its last report or its start."""
        self.longest = max(self.longest or 0.0, seconds)

    @property
    def patience(self) -> float:
        """Seconds after which a silent piece is ended; infinite while nothing is known or foreseen."""
        if self.longest is None:
            return min(self.most, max(self.FIRST_LEAST_S, self.TIMES * self.foreseen))
        return min(self.most, max(self.least, self.TIMES * self.longest))

    @property
    def told(self) -> str:
        """Of a piece that was ended, in words."""
        if self.longest is None:
            known, least = f"by the dry run's times it takes {self.foreseen:.3g} s", self.FIRST_LEAST_S
        else:
            known, least = f"where none had taken longer than {self.longest:.3g} s", self.least
        waited = f"({self.TIMES} times as long, and at least {least:.0f} s, are waited for)"
        return f"it was ended as it hung: {self.silence} for {self.patience:.0f} s, {known} {waited}"
