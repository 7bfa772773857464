"""The race of the finalists at full size: the choice at each milestone, and a forecast of each final score.

At a milestone, the trials with the best scores continue. Early scores mislead: configurations with high, decaying
learning rates start slowly but end first. Scores of averaged weights hide gains that training still brings, if the
average is over few steps. So the first milestone is at half of a training, and scores are those of the trained weights,
not of their averages. But the result of the race is the averaged weights of its winner. So the trial with the best
averages also continues (`with_leader`), and wins if its averages are far ahead in the end (`final_score`). These
choices, and the errors of forecasts, were fitted on recorded trainings and judged on others
(`benchmarks/results/replay_notes.md`).

Forecasts decide only at the last look, the milestone before the end. There, a trial behind the leader continues only if
its expected gain is worth the rest of its training. At other times, forecasts only tell how sure a choice is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median

from hydro_rasda.schedulers.ranking import Mode, ranked
from hydro_rasda.schedulers.sweep_rule import Continue, Move, Stop, SweepRule
from hydro_rasda.schedulers.sweep_state import SweepState

Curve = Mapping[int, float]
"""A trial's score by epoch."""

ERROR = 0.75
"""Standard deviation of the error of a forecast, relative to the root mean square of other trials' remaining changes.

It was chosen on half of the recorded tasks. On the other half, the stated probability that a winner is the best is
right.
"""

WORTH = 0.1
"""Gain that a full training must promise at the last look, relative to the usual change (see `Race.worthwhile`).

It was chosen on half of the recorded tasks and judged on the others, and vice versa. The halves chose 0.15 and 0.1.
With 0.1, no task loses more than 2 points (`benchmarks/results/replay_notes.md`).
"""

BEHIND = 0.15
"""Largest amount by which a final score is worse than the averages' score, as a share of the gain in training.

Both halves of the recorded tasks led to this value.
"""

_QUANTILES = [NormalDist().inv_cdf((i + 0.5) / 101) for i in range(101)]
_SHIFTS = [1.0433 * NormalDist().inv_cdf((i + 0.5) / 15) for i in range(15)]  # scaled to a standard deviation of 1


@dataclass(frozen=True)
class ExpectedEnd:
    """A trial's expected final score, as a normal distribution.

    Attributes:
        end: The mean of the distribution; not finite if the trial diverged.
        deviation: The standard deviation; infinite if nothing is known of the remaining training.
        shared: Standard deviation of an additional error. The same error applies to all trials of a race whose `shared`
            is above 0.
    """

    end: float
    deviation: float
    shared: float = 0.0


@dataclass(frozen=True)
class Race:
    """Decide at each milestone which trials continue.

    Attributes:
        max_t: Epochs of a full training.
        reduction_factor: One in `reduction_factor` trials continues in any case.
        full_trainings: The budget in full trainings. More trials continue if the budget can train them to the end.
    """

    max_t: int
    mode: Mode
    reduction_factor: int
    full_trainings: float

    def promote(self, stop: int, scores: Mapping[int, float], trained: int) -> list[int]:
        """Return the trials that continue after a milestone, best first; none if all diverged.

        Args:
            trained: Number of epochs that all finalists together have trained at full size so far.

        >>> Race(4, "min", 2, 3.0).promote(2, {0: 0.4, 1: 0.3, 2: 0.9, 3: math.nan}, trained=8)
        [1, 0]
        """
        return self._ranked(scores)[: max(len(scores) // self.reduction_factor, self.affordable(stop, trained))]

    def _ranked(self, scores: Mapping[int, float]) -> list[int]:
        return [n for n in ranked(dict(sorted(scores.items())), self.mode) if math.isfinite(scores[n])]

    def worthwhile(self, stop: int, scores: Mapping[int, float], curves: Mapping[int, Curve]) -> list[int]:
        """Return the trials that are worth the rest of their training at the last look, best first.

        The leader always continues. Another trial continues if its expected improvement on the leader is worth its
        remaining epochs: more than `WORTH` times the usual change, per full training. The usual change is the root mean
        square of the changes of scores between the epochs `stop / 2` and `stop`. A final score is expected to equal the
        present score. Its standard deviation is `ERROR` times the usual change, times the number of doublings from
        `stop` to `max_t`.

        Args:
            curves: Scores by epoch, which show how much trials change.

        >>> curves = {n: {3: 0.6, 6: 0.5} for n in (0, 1, 2)}
        >>> Race(8, "min", 2, 3.0).worthwhile(6, {0: 0.52, 1: 0.5, 2: 0.9}, curves)
        [1, 0]
        """
        running = self._ranked(scores)
        changes = [curves[n].get(stop, math.nan) - curves[n].get(math.ceil(stop / 2), math.nan) for n in running]
        usual = math.sqrt(fmean([change**2 for change in changes if math.isfinite(change)] or [math.inf]))
        if not math.isfinite(usual):
            return running
        # The difference of two final scores has sqrt(2) times the deviation of one.
        deviation = math.sqrt(2) * ERROR * usual * math.log2(self.max_t / stop)
        least = WORTH * usual * (self.max_t - stop) / self.max_t
        sign = 1.0 if self.mode == "max" else -1.0
        ahead = {n: sign * (scores[n] - scores[running[0]]) for n in running}
        return [n for n in running if n == running[0] or expected_improvement(ahead[n], deviation) > least]

    def with_leader(self, kept: Sequence[int], averaged: Mapping[int, float]) -> list[int]:
        """Return `kept`, and also the trial with the best averaged weights if it is not among these.

        High learning rates that do not decay move weights to and fro. Only averages show how good such a trial is.

        >>> Race(4, "min", 2, 3.0).with_leader([0], {0: 0.5, 1: 0.3, 2: math.nan})
        [0, 1]
        """
        return [*kept, *[n for n in self._ranked(averaged)[:1] if n not in kept]]

    def affordable(self, stop: int, trained: int) -> int:
        """Return how many trials the rest of the budget can train from a milestone to the end; at least 1.

        >>> race = Race(9, "min", 2, 2.5)
        >>> race.affordable(2, trained=4 * 2), race.affordable(9, trained=4 * 2 + 2 * 7)
        (2, 1)
        """
        left = self.max_t - stop
        return max(1, math.floor((self.full_trainings * self.max_t - trained) / left)) if left > 0 else 1

    def expected_ends(
        self, full: Mapping[int, Curve], over: Collection[int] = (), ends: Mapping[int, float] | None = None
    ) -> dict[int, ExpectedEnd]:
        """Forecast the final scores of trials.

        A stopped trial is expected to change by the median of the changes of the trials that trained to the end. The
        size of these changes determines how uncertain the forecast is. A part of the uncertainty is common to all
        stopped trials, and is larger if fewer trials have ended. Before any trial has ended, the uncertainty is
        infinite.

        Args:
            full: Each trial's scores by epoch, up to its last epoch so far.
            over: Trials whose training ended by itself, perhaps before `max_t`.
            ends: Final scores of ended trials, which averages may have changed (see `final_score`). The last score of
                any other ended trial is final. Forecasts of stopped trials do not include changes by averages.
        """
        ended = [n for n, curve in full.items() if math.isfinite(curve.get(self.max_t, math.nan))]
        found = {}
        for number, curve in full.items():
            at = max(curve, default=0)
            score = curve.get(at, math.nan)
            changes = [full[n][self.max_t] - full[n].get(at, math.nan) for n in ended]
            changes = [change for change in changes if math.isfinite(change)]
            if number in over or at >= self.max_t:
                found[number] = ExpectedEnd((ends or {}).get(number, score), 0.0)
            elif changes:
                deviation = ERROR * math.sqrt(fmean(change**2 for change in changes))
                found[number] = ExpectedEnd(score + median(changes), deviation, deviation / math.sqrt(len(changes)))
            else:
                found[number] = ExpectedEnd(score, math.inf)
        return found


@dataclass(frozen=True)
class RaceRule(SweepRule):
    """Decide each milestone of the race once all trials have come to it, or have ended before.

    If all trials that continued to a milestone have failed or diverged, the best of the trials that were stopped last
    train to that milestone.

    Attributes:
        race: Chooses the trials that continue. The mode of the state replaces its mode.
        milestones: Epochs at which trials are compared, in rising order. The last one ends the training.
        last_look: The milestone after which trials continue only if they are worth it (see `by_worth`); None for no
            such milestone.
        by_worth: True if only trials that are worth it continue from the last look. If False, all trials continue from
            it.
    """

    race: Race
    milestones: Sequence[int]
    last_look: int | None = None
    by_worth: bool = True

    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        if new := sweep.waiting_at(0):
            return {number: Continue(self.milestones[0]) for number in new}
        there = [] if sweep.training else self.compared(sweep)
        kept, reached = self._kept(there, sweep), _reached(sweep)
        if there and sweep.trials[there[0]].dropped:
            return {number: Continue(reached) for number in kept}
        later = [stop for stop in self.milestones if stop > reached]
        if kept and not later:  # the trials have reached the last milestone
            return {}
        return {number: Continue(later[0]) for number in kept} | {n: Stop() for n in sorted(there) if n not in kept}

    def compared(self, sweep: SweepState) -> list[int]:
        """Return the trials of the next decision, all of which stand at one milestone.

        They are the waiting trials that have not failed or ended by themselves. If there are none, and no trial has
        ended by itself, they are the trials that were stopped at one milestone. It is the latest milestone at which a
        stopped trial has a finite score.
        """
        racing = [number for number in sweep.waiting if sweep.ended.get(number) in (None, "diverged")]
        if racing or "done" in sweep.ended.values():
            return racing
        stopped = {number: trial.epoch for number, trial in sweep.trials.items() if number not in sweep.ended}
        for stop in reversed([at for at in self.milestones if at < _reached(sweep)]):
            there = [number for number, at in stopped.items() if at == stop]
            if self._kept(there, sweep):
                return there
        return []

    def finalists(self, sweep: SweepState) -> Sequence[int]:
        """Return the best of the trials that came to the last milestone, best first."""
        end = self.milestones[-1]
        return self._kept([number for number in self.compared(sweep) if sweep.trials[number].epoch == end], sweep)

    def _kept(self, there: Sequence[int], sweep: SweepState) -> list[int]:
        """Return the trials at one milestone that continue, best first."""
        if not there:
            return []
        stop = sweep.trials[there[0]].epoch
        scores = {number: sweep.scores[stop][number] for number in there}
        all_go_on = sweep.at_chance or (stop == self.last_look and not self.by_worth)
        race = replace(self.race, mode=sweep.mode, reduction_factor=1 if all_go_on else self.race.reduction_factor)
        if stop == self.last_look and not all_go_on:
            kept = race.worthwhile(stop, scores, {number: sweep.trials[number].curve for number in there})
        else:
            kept = race.promote(stop, scores, sweep.spent)
        averages = sweep.averages.get(stop, {})
        ends = stop == self.milestones[-1]
        return kept if ends else race.with_leader(kept, {n: averages[n] for n in there if n in averages})


def _reached(sweep: SweepState) -> int:
    """Return the last milestone that any trial reached, or was on its way to when it ended."""
    return max((trial.epoch for trial in sweep.trials.values()), default=0)


def final_score(own: float, averaged: float, first: float, mode: Mode) -> float:
    """Return the score by which a trial is compared in the end.

    It is the score of the trained, unaveraged weights. A user who trains the configuration again without averages gets
    such weights. But the winner of the race is returned with its averaged weights. Averaged weights may be far better
    if a high learning rate does not decay. So the final score is worse than that of the averages by at most `BEHIND`
    times the gain in training.

    Args:
        own: Score of the trained weights. If it is not finite, the trial has no score.
        averaged: Score of the averaged weights. If it is not finite, only `own` counts.
        first: Score after the first epoch, from which the gain is counted. If it is not finite, the gain is 0.

    >>> [final_score(own, 0.3, 0.7, "min") for own in (0.32, 0.5, math.nan)], final_score(0.5, math.nan, 0.7, "min")
    ([0.32, 0.36, nan], 0.5)
    """
    sign = 1.0 if mode == "max" else -1.0
    if not (math.isfinite(own) and math.isfinite(averaged)):
        return own
    gain = max(0.0, sign * (averaged - first)) if math.isfinite(first) else 0.0
    return sign * max(sign * own, sign * averaged - BEHIND * gain)


def chances(expected_ends: Mapping[int, ExpectedEnd], mode: Mode) -> dict[int, float]:
    """Return each trial's probability of being the best. They sum to 1; a trial that diverged has 0.

    If the deviation of some trial is infinite, all trials that did not diverge have the same probability.

    >>> chances({3: ExpectedEnd(0.5, 0.1), 5: ExpectedEnd(0.5, 0.1), 6: ExpectedEnd(math.nan, 0.1)}, "min")
    {3: 0.5, 5: 0.5, 6: 0.0}
    """
    running = {n: found for n, found in expected_ends.items() if math.isfinite(found.end)}
    if any(math.isinf(found.deviation) for found in running.values()):
        wins = dict.fromkeys(running, 1.0)
    else:
        shifts = _SHIFTS if any(found.shared for found in running.values()) else (0.0,)
        together = [{n: replace(f, end=f.end + shift * f.shared) for n, f in running.items()} for shift in shifts]
        wins = {n: fmean(_wins(n, each, 1.0 if mode == "max" else -1.0) for each in together) for n in running}
    total = sum(wins.values())
    return {n: wins[n] / total if n in wins else 0.0 for n in expected_ends}


def _wins(number: int, expected_ends: Mapping[int, ExpectedEnd], sign: float) -> float:
    """Return the probability that no other trial does better, averaged over quantiles of the trial's own end."""
    own = expected_ends[number]
    values = [sign * own.end + own.deviation * z for z in (_QUANTILES if own.deviation else (0.0,))]
    others = [found for n, found in expected_ends.items() if n != number]
    return fmean(math.prod(_no_better(found, value, sign) for found in others) for value in values)


def _no_better(found: ExpectedEnd, value: float, sign: float) -> float:
    """Return the probability that a trial's final score is no better than a value."""
    if not found.deviation:
        return float(sign * found.end <= value)
    # The formula of `NormalDist.cdf` stands here, because creating a `NormalDist` takes three times as long.
    return 0.5 * (1.0 + math.erf((value - sign * found.end) / (found.deviation * math.sqrt(2.0))))


def expected_gain(expected_ends: Sequence[ExpectedEnd], mode: Mode) -> float:
    """Return an upper bound of the expected improvement by one more full training.

    One more trial of the same distribution beats the best of k trials in one of k + 1 cases. It then leads by about as
    much as the best leads the second (exactly so for an exponential tail). The result is an upper bound, because the
    next configuration of a sweep is probably worse. Return NaN for fewer than two trials.

    >>> expected_gain([ExpectedEnd(end, 0.0) for end in (0.5, 0.625, 0.75)], "max")
    0.03125
    """
    sign = 1.0 if mode == "max" else -1.0
    ends = sorted((sign * found.end for found in expected_ends if math.isfinite(found.end)), reverse=True)
    return (ends[0] - ends[1]) / (len(ends) + 1) if len(ends) > 1 else math.nan


def expected_improvement(ahead: float, deviation: float) -> float:
    """Return the mean of `max(X, 0)` for a normal variable X with mean `ahead` (Jones et al. 1998, eq. 15).

    >>> expected_improvement(0.5, 0.0), expected_improvement(-0.5, 0.0), round(expected_improvement(0.0, 1.0), 4)
    (0.5, 0.0, 0.3989)
    """
    if not deviation:
        return max(ahead, 0.0)
    z, normal = ahead / deviation, NormalDist()
    return deviation * (normal.pdf(z) + z * normal.cdf(z))
