"""Choose the winner among the full-size trainings, and the epoch whose weights it hands back."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydro_rasda.run.full_size_journal import (
    at_the_end,
    end_score,
    found_enough,
    kept_of,
    refit_key,
    source_of,
    tried_targets,
)
from hydro_rasda.run.state import Run, Stage
from hydro_rasda.schedulers.ranking import ranked


def best_of(run: Run, finalists: Sequence[int]) -> tuple[int, float]:
    """Return the winner and its metric at full size; if no trial has one, the best surrogate, and NaN.

    The winner is the best at its end (`end_score`). If no training came to an end, or a score was as good as `stop_at`
    asks, it is the trial whose kept weights are best. Trials that break a bound of a metric more than others do cannot
    win. With several metrics, the winner is on the front of the trials that came to their end.
    """
    if able := eligible(run, finalists):
        comparison = run.settings.comparison
        if comparison.of_training:
            able = comparison.best(_kept_values(run, able))
        ended = [] if found_enough(run) else [n for n in able if at_the_end(run, n)]
        if comparison.several:
            ended = comparison.front(_kept_values(run, ended)) or ended
        ends = {n: end_score(run, n) for n in ended}
        winner = ranked(ends or {n: kept_of(run, n)[1] for n in able}, run.settings.mode)[0]
        return winner, kept_of(run, winner)[1]
    swept = _longest_trained(run, sorted(run.trials), "surrogate") or [0]
    return ranked({n: run.score("surrogate", n) for n in swept}, run.settings.mode)[0], math.nan


def _kept_values(run: Run, numbers: Sequence[int]) -> dict[int, dict[str, float]]:
    return {n: run.values_at("target", n, kept_of(run, n)[0]) for n in numbers}


def drop_lost_winner(run: Run, finalists: Sequence[int]) -> bool:
    """Drop a finished run's winner if the weights that it hands back are damaged, so that it trains anew.

    Return whether it was dropped.
    """
    winner, _ = best_of(run, tried_targets(run, finalists))
    refit = refit_key(winner, kept_of(run, winner)[0])
    if run.settings.race.refit and run.refits.get(winner) == refit and run.can_load(refit):
        return False
    return winner in finalists and winner in run.checkpoints and source_of(run, winner) is None


def eligible(run: Run, finalists: Sequence[int]) -> list[int]:
    """Return the finalists that may win: they have a finite metric.

    If last weights count, they came to their end. If none did, they came furthest.
    """
    if run.settings.race.keep == "best":
        return [n for n in finalists if math.isfinite(kept_of(run, n)[1])]
    return [n for n in finalists if at_the_end(run, n)] or _longest_trained(run, finalists)


def _longest_trained(run: Run, numbers: Sequence[int], stage: Stage = "target") -> list[int]:
    """Return the trials with a finite score that came furthest.

    If last weights count, a better score of a trial that was stopped earlier is no promise: it does not tell where that
    trial would have ended.
    """
    able = scored(run, numbers, stage)
    last = max((run.epochs(stage, n) for n in able), default=0)
    return [n for n in able if run.epochs(stage, n) == last]


def scored(run: Run, numbers: Sequence[int], stage: Stage = "target") -> list[int]:
    """Return the trials with a finite score in a stage."""
    return [n for n in numbers if math.isfinite(run.score(stage, n))]
