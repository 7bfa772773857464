"""The curves of trials: scores by epoch, the scores that decide comparisons, and how far each trial can train."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.history.lines import JournalLine, number_of, score_in
from hydro_rasda.schedulers import final_score, rank
from hydro_rasda.schedulers.sweep_state import End
from hydro_rasda.settings.config import Mode, TuneConfig, averaged, unaveraged

OWN_LOOP = "own loop"
"""The kind (`FusedHeat.kinds`) of all trials of a sweep in which a function of the user trains."""


class Curves:
    """The epochs that a run's trials have trained, and methods that answer questions about them.

    Attributes:
        settings: The settings of the run.
        own_loop: True if a function of the user trains, at least at full size.
        costs: `costs[trial]` has the costs by which full-size models are compared; see `objectives.COSTS`.
        metrics: `metrics[heat, trial]` has the trial's journal lines, one for each epoch.
        failed: `failed[heat, trial]` is the traceback of a trial that raised.
        best: With `keep="best"`, maps each full-size trial to the epoch whose weights its last checkpoint keeps, and to
            the metric after that epoch.
        ended: Maps each trial whose full-size training ended by itself to its last epoch.
    """

    def __init__(self, settings: TuneConfig, own_loop: bool) -> None:
        self.settings, self.own_loop = settings, own_loop
        self.costs: dict[int, Mapping[str, float]] = {}
        self.metrics: dict[tuple[HeatName, int], list[JournalLine]] = {}
        self.failed: dict[tuple[HeatName, int], str] = {}
        self.best: dict[int, tuple[int, float]] = {}
        self.ended: dict[int, int] = {}

    @property
    def failures(self) -> dict[int, str]:
        """The traceback of each trial that raised in the sweep or at full size.

        A trial whose surrogate raised only in the middle heat may still train at full size.
        """
        return {number: error for (heat, number), error in self.failed.items() if heat != "middle"}

    def line_at(self, heat: HeatName, number: int, epoch: int) -> JournalLine | None:
        """Return a trial's journal line of an epoch; None if the trial has not trained this epoch."""
        lines = self.metrics.get((heat, number))
        if not lines or epoch > lines[-1]["epoch"]:
            return None
        if 0 < epoch <= len(lines) and lines[epoch - 1]["epoch"] == epoch:
            return lines[epoch - 1]
        at = bisect_left(lines, epoch, key=itemgetter("epoch"))
        return lines[at] if lines[at]["epoch"] == epoch else None

    def epochs(self, heat: HeatName, number: int) -> int:
        """Count the epochs that a trial has trained in a heat."""
        lines = self.metrics.get((heat, number))
        return int(lines[-1]["epoch"]) if lines else 0

    def has_failed(self, heat: HeatName, number: int) -> bool:
        """Tell whether a trial raised in the sweep or in this heat."""
        return ("sweep", number) in self.failed or (heat, number) in self.failed

    def diverged(self, heat: HeatName, number: int) -> bool:
        """Tell whether the training loss of a trial was not finite in its last epoch."""
        lines = self.metrics.get((heat, number))
        return lines[-1].get("train_loss", 0.0) is None if lines else False

    def score(self, heat: HeatName, number: int) -> float:
        """Return the metric after a trial's last epoch; NaN if it diverged, failed or never began."""
        if self.has_failed(heat, number):
            return math.nan
        return self.score_at(heat, number, self.epochs(heat, number))

    def score_at(self, heat: HeatName, number: int, epoch: int) -> float:
        """Return the metric after an epoch; NaN if the trial had diverged or has no metric there."""
        line = self.line_at(heat, number, epoch)
        return math.nan if line is None else self.score_of(line)

    def score_of(self, line: JournalLine, metric: str | None = None) -> float:
        """Return a metric of a journal line, by default the run's metric; NaN if the trial had diverged."""
        return number_of(score_in(line, metric or self.settings.metric))

    def values_at(self, heat: HeatName, number: int, epoch: int, suffix: str = "") -> dict[str, float]:
        """Return the costs, and the metrics after an epoch, by which a trial is compared.

        A metric is NaN if it is missing, or if the trial had diverged.

        Args:
            suffix: A suffix of metrics' names, see `config.unaveraged`. If the epoch has a metric under the name with
                this suffix, too, that value is returned in place of the metric's own.
        """
        found: dict[str, float] = {**self.costs.get(number, {})}
        line = self.line_at(heat, number, epoch) or {}
        for name in self.settings.comparison.trained:
            there = name + suffix if name + suffix in line else name
            found[name] = self.score_of(line, there) if there in line else math.nan
        return found

    def passed(self, heat: HeatName, number: int, epoch: int, *, is_own: bool = False) -> bool:
        """Tell whether a trial needs no training up to an epoch, because it trained that epoch, diverged or failed.

        Args:
            is_own: True if a function of the user trains. It is not called again after a metric that is not finite.
        """
        trained = self.line_at(heat, number, epoch) is not None
        lost = is_own and self.epochs(heat, number) > 0 and not math.isfinite(self.score(heat, number))
        return trained or lost or self.has_failed(heat, number) or self.diverged(heat, number)

    def curve(self, heat: HeatName, number: int) -> dict[int, float]:
        """Return the metric by epoch; NaN if the trial had diverged or has no metric there."""
        lines = self.metrics.get((heat, number), ())
        return {line["epoch"]: self.score_of(line) for line in lines}


def deciding_curve(history: Curves, number: int, *, with_averages: bool = True) -> dict[int, float]:
    """Return the scores, by epoch, by which a full-size trial is compared with others.

    With `keep="best"`, a trial hands back its best epoch, but trials are compared by their last epochs. The reason is
    that a user who trains the winner's configuration again, elsewhere or on more data, gets the weights of the last
    epoch. But if training may end by early stopping (`patience`), or a user's function returned before the end, each
    score is that of the best epoch so far. If weights are averaged, the curve has the scores of the unaveraged weights,
    at the epochs at which these were validated. At the end, averages also count (`final_score`), unless there are
    several metrics.

    Args:
        with_averages: False ignores averages at the end, too.
    """
    settings, curve = history.settings, history.curve("race", number)
    if settings.race.keep == "best" and (settings.race.patience is not None or done_early(history, number)):
        return dict(zip(curve, accumulate(curve.values(), partial(_better, mode=settings.mode))))
    found = dict[int, float]()
    for line in history.metrics.get(("race", number), ()):
        if (name := unaveraged(settings.metric)) in line:
            score = history.score_of(line, name)
            if with_averages and line["epoch"] == settings.max_t and not settings.comparison.by_place:
                score = final_score(score, history.score_of(line), next(iter(curve.values())), settings.mode)
            found[line["epoch"]] = score
        elif averaged(settings.metric) in line:
            found[line["epoch"]] = history.score_of(line)
    return found or curve


def kept_of(history: Curves, number: int) -> tuple[int, float]:
    """Return the full-size epoch whose weights count, and the metric after that epoch.

    With `keep="best"`, it is the best epoch, even if the trial diverged or raised later.
    """
    score = history.score("race", number)
    last = history.epochs("race", number), score
    return history.best.get(number, last) if history.settings.race.keep == "best" or math.isfinite(score) else last


def averages_at(history: Curves, stop: int, numbers: Iterable[int]) -> dict[int, float]:
    """Return the scores of averaged weights after an epoch, for trials that are compared by unaveraged weights."""
    lines = {n: history.line_at("race", n, stop) or {} for n in numbers}
    return {n: history.score_of(line) for n, line in lines.items() if unaveraged(history.settings.metric) in line}


def averages_lost(lines: Iterable[Mapping[str, Any]], epoch: int, metric: str) -> bool:
    """Tell whether averaged weights were worse after an epoch than the trained weights.

    Then the trained weights count.

    >>> lines = [{"epoch": 1, "val_loss": 0.5, "val_loss_averaged": 0.6}, {"epoch": 2, "val_loss": 0.4}]
    >>> [averages_lost(lines, epoch, "val_loss") for epoch in (1, 2, 3)]
    [True, False, False]
    """
    return any(averaged(metric) in line for line in lines if line["epoch"] == epoch)


def done_early(history: Curves, number: int) -> bool:
    """Tell whether a full-size training ended by itself before the last epoch."""
    return number in history.ended and history.ended[number] == history.epochs("race", number)


def ended_early(history: Curves, number: int) -> bool:
    """Tell whether a full-size trial cannot continue, even with time left, because it raised or diverged.

    A trial whose metric is not finite continues, because the metric may become finite. But if a user's function trains,
    such a trial ends, because that function is not called again.
    """
    own_loop = history.own_loop and history.epochs("race", number) > 0
    lost = own_loop and not math.isfinite(history.score("race", number))
    return lost or history.has_failed("race", number) or history.diverged("race", number)


def places_at(history: Curves, stop: int, scores: Mapping[int, float]) -> dict[int, float]:
    """Return the places of full-size trials at a milestone, by all values that are compared; 0 is the best place."""
    values = {n: history.values_at("race", n, stop, suffix=unaveraged("")) for n in scores}
    return history.settings.comparison.places(
        {n: of | {history.settings.metric: scores[n]} for n, of in values.items()}
    )


def _better(one: float, other: float, mode: Mode) -> float:
    return (one, other)[rank((one, other), mode)[0]]


def end_of(history: Curves, number: int) -> End | None:
    """Return how a full-size trial ended before its last epoch; None if it did not."""
    if done_early(history, number):
        return "done"
    if history.has_failed("race", number):
        return "failed"
    return "diverged" if ended_early(history, number) else None


def goes_on(history: Curves, number: int, stop: int) -> bool:
    """Tell whether a full-size trial still has epochs to train before a milestone."""
    return history.epochs("race", number) < stop and end_of(history, number) is None
