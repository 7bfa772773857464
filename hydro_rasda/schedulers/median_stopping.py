"""The median stopping rule of Golovin et al., "Google Vizier" (2017), Section 3.2.1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

from hydro_rasda.argument_checks import check_int, require
from hydro_rasda.schedulers.sweep_rule import Continue, Move, Stop, SweepRule
from hydro_rasda.schedulers.sweep_state import Standing, SweepState


@dataclass(frozen=True)
class MedianStopping(SweepRule):
    """Stop a trial whose best score is worse than the median of the other trials' average scores up to its epoch.

    An epoch is decided when all trials on their way to it are there, or where a device has nothing to do.

    Attributes:
        last: The epoch at which the sweep ends.
        grace_period: Epochs before any trial stops; averages begin there, too.
        min_trials: Other trials that a decision takes at least; with fewer, a trial goes on.

    Raises:
        ValueError: If a number is no integer or out of range.
    """

    last: int
    grace_period: int = 1
    min_trials: int = 3

    def __post_init__(self) -> None:
        check_int("last", self.last, at_least=1)
        check_int("grace_period", self.grace_period, at_least=1)
        check_int("min_trials", self.min_trials, at_least=1)
        require(self.grace_period <= self.last, "grace_period", self.grace_period, f"<= last ({self.last})")

    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        """Have all trials but those worse than the median train for one more epoch."""
        if new := sweep.waiting_at(0):
            return {number: Continue(self.grace_period) for number in new}
        moves: dict[int, Move] = {}
        for epoch in sorted({trial.epoch for trial in sweep.waiting.values()} - {self.last}):
            if sweep.idle or not sweep.training_to(epoch):
                for number, trial in sweep.waiting_at(epoch).items():
                    moves[number] = Stop() if self._is_worse(trial, sweep) else Continue(epoch + 1)
        return moves

    def _is_worse(self, trial: Standing, sweep: SweepState) -> bool:
        if not math.isfinite(trial.score):
            return True
        sign = 1.0 if sweep.mode == "min" else -1.0
        others = (other for other in sweep.trials.values() if other is not trial and other.epoch >= trial.epoch)
        within = range(self.grace_period, trial.epoch + 1)
        means = (fmean(score for at, score in other.curve.items() if at in within) for other in others)
        averages = [mean for mean in means if math.isfinite(mean)]
        if len(averages) < self.min_trials:
            return False
        best = min(sign * score for score in trial.curve.values() if math.isfinite(score))
        return best > sign * median(averages)

    def epochs(self, sweep: SweepState) -> int:
        """Epochs that all trials together train at most: about half of them stop after each decision's median."""
        return (len(sweep.trials) + sweep.left) * self.last
