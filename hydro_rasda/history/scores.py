"""The score of a full-size trial at each epoch, and how far it can train.

The history asks this of itself, so that trials come to their milestones in the fold of the journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hydro_rasda.config import Mode, averaged, unaveraged
from hydro_rasda.schedulers import final_score, rank
from hydro_rasda.schedulers.sweep_state import End

if TYPE_CHECKING:  # which imports this module
    from hydro_rasda.history.history import History


def deciding_curve(history: History, number: int, *, with_averages: bool = True) -> dict[int, float]:
    """Return the scores by which a full-size trial is compared, by epoch.

    With `keep="best"`, a trial hands back its best epoch, but trials are compared by their last epochs. A user who
    trains the winner's configuration again, elsewhere or on more data, gets the last epoch. If weights are averaged,
    the curve is of the unaveraged ones, at the epochs at which these were validated as well. In the end, averages
    count, too (`final_score`), unless there are several metrics. The best epoch so far counts if training ends by early
    stopping (`patience`), or by a user's function that returns before the end.

    Args:
        with_averages: False to leave averages out in the end, too.
    """
    settings, curve = history.settings, history.curve("target", number)
    if settings.race.keep == "best" and (settings.race.patience is not None or done_early(history, number)):
        return dict(zip(curve, accumulate(curve.values(), partial(_better, mode=settings.mode))))
    found = dict[int, float]()
    for line in history.metrics.get(("target", number), ()):
        if (name := unaveraged(settings.metric)) in line:
            score = history.score_of(line, name)
            if with_averages and line["epoch"] == settings.max_t and not settings.comparison.by_place:
                score = final_score(score, history.score_of(line), next(iter(curve.values())), settings.mode)
            found[line["epoch"]] = score
        elif averaged(settings.metric) in line:
            found[line["epoch"]] = history.score_of(line)
    return found or curve


def kept_of(history: History, number: int) -> tuple[int, float]:
    """Return the full-size epoch whose weights count, and the metric after it.

    A trial's best epoch counts even if it diverged or raised later.
    """
    score = history.score("target", number)
    last = history.epochs("target", number), score
    return history.best.get(number, last) if history.settings.race.keep == "best" or math.isfinite(score) else last


def averages_at(history: History, stop: int, numbers: Iterable[int]) -> dict[int, float]:
    """Return the scores of averaged weights after an epoch, of trials that have some and are compared by others."""
    lines = {n: history.line_at("target", n, stop) or {} for n in numbers}
    return {n: history.score_of(line) for n, line in lines.items() if unaveraged(history.settings.metric) in line}


def averages_lost(lines: Iterable[Mapping[str, Any]], epoch: int, metric: str) -> bool:
    """Tell whether averaged weights were worse after an epoch than those that training left, which count then."""
    return any(averaged(metric) in line for line in lines if line["epoch"] == epoch)


def done_early(history: History, number: int) -> bool:
    """Tell whether the training of a full-size trial has ended by itself before the last epoch."""
    return number in history.ended and history.ended[number] == history.epochs("target", number)


def ended_early(history: History, number: int) -> bool:
    """Tell whether a full-size trial cannot go on, even with time left: it raised, or it diverged.

    A metric may be finite again later. But a training function of the user's is left where its metric is not.
    """
    own_loop = history.own_loop and history.epochs("target", number) > 0
    lost = own_loop and not math.isfinite(history.score("target", number))
    return lost or number in history.failures or history.diverged("target", number)


def places_at(history: History, stop: int, scores: Mapping[int, float]) -> dict[int, float]:
    """Return the places of full-size trials at a milestone by all that they are compared by."""
    values = {n: history.values_at("target", n, stop, suffix=unaveraged("")) for n in scores}
    return history.settings.comparison.places(
        {n: of | {history.settings.metric: scores[n]} for n, of in values.items()}
    )


def _better(one: float, other: float, mode: Mode) -> float:
    return (one, other)[rank((one, other), mode)[0]]


def end_of(history: History, number: int) -> End | None:
    """Return how a full-size trial has ended before its last epoch; None if it has not."""
    if done_early(history, number):
        return "done"
    if number in history.failures:
        return "failed"
    return "diverged" if ended_early(history, number) else None


def goes_on(history: History, number: int, stop: int) -> bool:
    """Tell whether a full-size trial still has epochs to train before a milestone."""
    return history.epochs("target", number) < stop and end_of(history, number) is None
