"""A run's time budget, shared between its stages."""

from __future__ import annotations

import math

from hydro_rasda.run.events import Stage

SWEEP_SHARE = 0.5
"""Share of a time budget that the sweep may spend; the rest trains the finalists."""


def seconds_left(budget: float | None, stage: Stage, seconds: float, swept: float) -> float:
    """Return the seconds that a stage may still take; infinite without a budget.

    Only the sweep's own time counts against its share, not full-size training. The same call with more time thus goes
    on with the sweep, too.

    Args:
        budget: The time budget in seconds; None for none.
        seconds: Time that the run has taken so far.
        swept: The part of `seconds` that the sweep took.

    >>> seconds_left(100.0, "surrogate", 80.0, 10.0), seconds_left(100.0, "surrogate", 10.0, 10.0)
    (20.0, 40.0)
    """
    if budget is None:
        return math.inf
    left = budget - seconds
    return left if stage == "target" else min(left, SWEEP_SHARE * budget - swept)
