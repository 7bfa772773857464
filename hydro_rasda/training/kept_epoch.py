"""Choose the epoch whose weights a full-size training hands back; its checkpoint keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hydro_rasda.config import Mode

TOLERANCE = 0.01
"""Share of what a training has gained since its first epoch, by which the kept epoch may be worse than the best one.

The best of many noisy scores is partly luck, and later weights are better trained. On recorded trainings
(`benchmarks/results/replay_notes.md`) the models handed back test better with anything from 0.5 to 2 % than with none.
"""


def bettered(
    best: dict[str, Any] | None, epoch: int, score: float, mode: Mode, weights: Callable[[], Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the entry to keep after an epoch: this epoch if it is as good as the best within `TOLERANCE`, else `best`.

    Args:
        best: The entry so far; None if there is none. It has "epoch", "score" and the weights, "model", of the kept
            epoch; also the first score, "first", the best score, "top", and its epoch, "top_epoch".
        score: The metric after the epoch; an epoch whose score is not finite is never kept.
        weights: Returns a copy of the weights after this epoch; called only if they are to be kept.
    """
    if not math.isfinite(score):
        return best
    if best is None:
        return {"epoch": epoch, "score": score, "model": weights(), "first": score, "top": score, "top_epoch": epoch}
    sign = 1.0 if mode == "max" else -1.0
    # One that an earlier version kept is the best.
    best = {"first": best["score"], "top": best["score"], "top_epoch": best["epoch"], **best}
    if sign * score > sign * best["top"]:
        best |= {"top": score, "top_epoch": epoch}
    if sign * (best["top"] - score) <= TOLERANCE * abs(best["top"] - best["first"]):
        best |= {"epoch": epoch, "score": score, "model": weights()}
    return best


def kept_epoch(curve: Mapping[int, float], mode: Mode) -> int:
    """Return the epoch that is kept of a training; 0 if none has a finite score.

    >>> kept_epoch({1: 1.0, 2: 0.2, 3: 0.205, 4: 0.3}, "min")
    3
    """
    best: dict[str, Any] | None = None
    for epoch, score in sorted(curve.items()):
        best = bettered(best, epoch, score, mode, dict)
    return 0 if best is None else int(best["epoch"])


def epochs_since(best: Mapping[str, Any] | None, epoch: int) -> int:
    """Return the number of epochs since the best one; 0 if there is none."""
    return 0 if best is None else epoch - int(best.get("top_epoch", best["epoch"]))
