"""One order of trials for every scheduler, the same on every machine and for every seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from hydro_rasda.checks import check_mode

Mode = Literal["min", "max"]


def rank(scores: Sequence[float], mode: Mode) -> list[int]:
    """Return the indices of `scores`, best first.

    Scores that are not finite come last in both modes: an infinite score of either sign is that of a diverged trial.
    Of equal scores, the one of lower index comes first; the same holds among scores that are not finite.

    >>> rank([0.3, float("nan"), 0.1, 0.3], "min")
    [2, 0, 3, 1]
    """
    check_mode(mode)
    sign = 1.0 if mode == "min" else -1.0

    def key(index: int) -> tuple[bool, float]:
        finite = math.isfinite(scores[index])
        return (not finite, sign * scores[index] if finite else 0.0)

    return sorted(range(len(scores)), key=key)
