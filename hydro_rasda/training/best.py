"""The best epoch of a full-size training, as its checkpoint keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hydro_rasda.config import Mode
from hydro_rasda.schedulers import rank


def bettered(
    best: dict[str, Any] | None, epoch: int, score: float, mode: Mode, weights: Callable[[], Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The best of epochs: the one that was, unless this one scores better.

    Args:
        best: The best before: "epoch", "score" and "model", its weights; None where there is none.
        epoch: How many are trained.
        score: The metric after them; one that is not finite is never the best.
        mode: Whether less or more of it is better.
        weights: Gives a copy of the weights after this epoch; called only where they are to be kept.
    """
    scores = [math.nan if best is None else best["score"], score]
    if rank(scores, mode)[0] == 0:
        return best
    return {"epoch": epoch, "score": score, "model": weights()}


def epochs_since(best: Mapping[str, Any] | None, epoch: int) -> int:
    """How many epochs have not been better than the best; 0 where there is none."""
    return 0 if best is None else epoch - int(best["epoch"])
