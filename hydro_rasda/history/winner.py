"""Choose the winner among the full-size trainings, and the epoch whose weights are handed back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.history.full_size import at_the_end, end_score, found_enough
from hydro_rasda.history.history import History
from hydro_rasda.history.scores import kept_of
from hydro_rasda.schedulers.ranking import ranked


def best_of(history: History, finalists: Sequence[int]) -> tuple[int, float]:
    """Return the winner and its full-size metric.

    The winner is the trial with the best `end_score`. If no training came to its end, or if a score reached `stop_at`,
    the winner is the trial whose kept weights are best. A trial cannot win if another trial breaks the bounds of
    metrics by less. With several metrics, the winner is on the Pareto front of the trials that came to their ends. If
    no trial can win, return the trial with the best surrogate of the last heat, and NaN.
    """
    if able := eligible(history, finalists):
        comparison = history.settings.comparison
        if comparison.of_training:
            able = comparison.best(_kept_values(history, able))
        ended = [] if found_enough(history) else [n for n in able if at_the_end(history, n)]
        if comparison.several:
            ended = comparison.front(_kept_values(history, ended)) or ended
        ends = {n: end_score(history, n) for n in ended}
        winner = ranked(ends or {n: kept_of(history, n)[1] for n in able}, history.settings.mode)[0]
        return winner, kept_of(history, winner)[1]
    numbers = sorted(history.trials)
    heat: HeatName = "middle" if scored(history, numbers, "middle") else "sweep"
    swept = _longest_trained(history, numbers, heat) or [0]
    return ranked({n: history.score(heat, n) for n in swept}, history.settings.mode)[0], math.nan


def _kept_values(history: History, numbers: Sequence[int]) -> dict[int, dict[str, float]]:
    return {n: history.values_at("race", n, kept_of(history, n)[0]) for n in numbers}


def eligible(history: History, finalists: Sequence[int]) -> list[int]:
    """Return the finalists that may win. They have a finite metric.

    With `keep="last"`, they must have come to their ends. If none did, the finalists that trained longest may win.
    """
    if history.settings.race.keep == "best":
        return [n for n in finalists if math.isfinite(kept_of(history, n)[1])]
    return [n for n in finalists if at_the_end(history, n)] or _longest_trained(history, finalists)


def _longest_trained(history: History, numbers: Sequence[int], heat: HeatName = "race") -> list[int]:
    """Return the trials with a finite score that trained the most epochs.

    A trial that was stopped earlier may have a better score, but that score does not tell its final score.
    """
    able = scored(history, numbers, heat)
    last = max((history.epochs(heat, n) for n in able), default=0)
    return [n for n in able if history.epochs(heat, n) == last]


def scored(history: History, numbers: Sequence[int], heat: HeatName = "race") -> list[int]:
    """Return the trials with a finite score in a heat."""
    return [n for n in numbers if not history.has_failed("race", n) and math.isfinite(history.score(heat, n))]
