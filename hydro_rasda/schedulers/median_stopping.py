"""The median stopping rule of Golovin et al., "Google Vizier" (2017), Section 3.2.1."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hydro_rasda.common.argument_checks import check_int, require
from hydro_rasda.schedulers.sweep_rule import Continue, Move, RuleToLast, Stop
from hydro_rasda.schedulers.sweep_state import Standing, SweepState


@dataclass(frozen=True)
class MedianStopping(RuleToLast):
    """Stop a trial whose best score is worse than the median of the other trials' average scores up to its epoch.

    Trials at an epoch are decided when no trial is on its way to this epoch, or when a device is idle.

    Attributes:
        last: The epoch at which the sweep ends.
        grace_period: The epoch of the first decision. Averages leave out earlier epochs.
        min_trials: Least number of other trials for a decision. If there are fewer, a trial continues.

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
        """Let all trials train for one more epoch, except those worse than the median."""
        if new := sweep.waiting_at(0):
            return {number: Continue(self.grace_period) for number in new}
        moves: dict[int, Move] = {}
        for epoch in sorted({trial.epoch for trial in sweep.waiting.values()} - {self.last}):
            if sweep.idle or not sweep.training_to(epoch):
                averages = self._averages(epoch, sweep)
                in_order = sorted(averages.values())
                for number, trial in sweep.waiting_at(epoch).items():
                    worse = self._is_worse(trial, averages, in_order, sweep)
                    moves[number] = Stop() if worse else Continue(epoch + 1)
        return moves

    def _averages(self, epoch: int, sweep: SweepState) -> dict[int, float]:
        """Return each trial's mean score up to an epoch that it reached; leave out trials that diverged on the way."""
        within = range(self.grace_period, epoch + 1)
        there = {number: trial.curve for number, trial in sweep.trials.items() if trial.epoch >= epoch}
        means = {number: fmean(score for at, score in curve.items() if at in within) for number, curve in there.items()}
        return {number: mean for number, mean in means.items() if math.isfinite(mean)}

    def _is_worse(
        self, trial: Standing, averages: Mapping[int, float], in_order: Sequence[float], sweep: SweepState
    ) -> bool:
        if not math.isfinite(trial.score):
            return True
        own = bisect_left(in_order, averages[trial.number]) if trial.number in averages else None
        if len(in_order) - (own is not None) < self.min_trials:
            return False
        sign = 1.0 if sweep.mode == "min" else -1.0
        best = min(sign * score for score in trial.curve.values() if math.isfinite(score))
        return best > sign * _median_without(in_order, own)


def _median_without(in_order: Sequence[float], at: int | None) -> float:
    """Return the median of rising numbers, without the number at position `at`.

    >>> _median_without([1.0, 2.0, 4.0, 8.0], 1), _median_without([1.0, 2.0, 4.0], 2), _median_without([1.0, 2.0], None)
    (4.0, 1.5, 1.5)
    """
    left = len(in_order) - (at is not None)
    low, high = (in_order[i + (at is not None and i >= at)] for i in ((left - 1) // 2, left // 2))
    return low if left % 2 else (low + high) / 2
