"""The race of the finalists at full size: where each will end, who may still be the best, and who goes on.

Surrogates trained under the same schedule and have been at its end: curves cross late where learning rates decay, or
where a configuration overfits. But both curves are noisy, and a surrogate is not its model. How far ends lie from what
is expected was measured on recorded trainings (`benchmarks/results/replay_notes.md`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median
from typing import Literal

from hydro_rasda.config import Mode
from hydro_rasda.schedulers.ranking import rank

Curve = Mapping[int, float]
"""A trial's score by epoch."""

ERROR = 0.35
"""Standard deviation of ends from what is expected, over the root mean square of what trials still change by."""

UNLIKELY = 0.4
"""A trial stops whose chance is less than this share of the favourite's, times the share of a training that is left."""

_QUANTILES = [NormalDist().inv_cdf((i + 0.5) / 101) for i in range(101)]
_SHIFTS = [1.0433 * NormalDist().inv_cdf((i + 0.5) / 15) for i in range(15)]  # of deviation 1


@dataclass(frozen=True)
class Outlook:
    """What a trial may still come to: a normal distribution, cut off below by what it already has.

    Attributes:
        so_far: The score that is kept whatever comes; None where none is.
        end: What it is expected to score in the end; not finite where it diverged.
        deviation: Standard deviation of that; infinite where nothing is known of what is left.
        shared: Standard deviation of what all of a race that have one are off by together, on top of that.
    """

    so_far: float | None
    end: float
    deviation: float
    shared: float = 0.0

    def expected(self, mode: Mode) -> float:
        """The score that it is expected to be kept with."""
        known = [value for value in (self.end, self.so_far) if value is not None]
        return known[rank(known, mode)[0]] if math.isfinite(self.end) else self.end


@dataclass(frozen=True)
class Race:
    """Decides at each milestone who goes on.

    Attributes:
        max_t: Epochs of a full training.
        mode: Whether less is better.
        keep: Whether a trial's "best" epoch counts, or its "last".
        reduction_factor: One in so many goes on in any case, if that many may still be the best.
        full_trainings: The budget, in full trainings: more go on where they can train to the end for it.
    """

    max_t: int
    mode: Mode
    keep: Literal["last", "best"]
    reduction_factor: int
    full_trainings: float

    def promote(self, stop: int, full: Mapping[int, Curve], narrow: Mapping[int, Curve], trained: int) -> list[int]:
        """Who goes on from a milestone, the likeliest to be the best first; none where all diverged.

        Args:
            stop: The milestone.
            full: Each trial's curve at full size; without a finite score at the milestone, it is out.
            narrow: Each trial's curve on its surrogate.
            trained: Epochs that were trained at full size by then, by all finalists.
        """
        found = self.outlooks(dict.fromkeys(full, stop), full, narrow)
        chance = chances(found, self.mode)
        numbers = sorted(found)
        by_end = [numbers[i] for i in rank([found[n].expected(self.mode) for n in numbers], self.mode)]
        favourite = max(chance.values(), default=0.0)
        enough = UNLIKELY * (1 - stop / self.max_t) * favourite
        likely = [n for n in sorted(by_end, key=lambda n: -chance[n]) if chance[n] > 0 and chance[n] >= enough]
        return likely[: max(len(full) // self.reduction_factor, self.affordable(stop, trained))]

    def affordable(self, stop: int, trained: int) -> int:
        """How many can train from a milestone to the end for what is left of the budget; at least one.

        >>> race = Race(9, "min", "best", 2, 2.5)
        >>> race.affordable(2, trained=4 * 2), race.affordable(9, trained=4 * 2 + 2 * 7)
        (2, 1)
        """
        left = self.max_t - stop
        return max(1, math.floor((self.full_trainings * self.max_t - trained) / left)) if left > 0 else 1

    def outlooks(
        self,
        epochs: Mapping[int, int],
        full: Mapping[int, Curve],
        narrow: Mapping[int, Curve],
        over: Collection[int] = (),
    ) -> dict[int, Outlook]:
        """What trials may still come to.

        Trials that went further tell by how much all were misjudged at an epoch. The others are expected to be off by
        the median of that, and the less surely, the fewer they were: of one, its own share cannot be known. So a trial
        that was stopped is compared with the others as they were then. Of trials that were alike, none is the likeliest
        to be the best because it went on, or because it was stopped.

        Args:
            epochs: Where each is.
            full: Each trial's curve at full size; what lies behind its epoch does not count.
            narrow: Each trial's curve on its surrogate. They count up to the last epoch that all of them reached. From
                there on, trials are expected to stay where they are, as uncertainly as those changed that are at their
                end at full size, or as they have changed since half of their epochs.
            over: Those whose training has ended by itself, where they are.
        """
        found: dict[int, Outlook] = {}
        for epoch in sorted(set(epochs.values()), reverse=True):
            ends, deviation = self._forecast(epoch, epochs, full, narrow)
            misses = [further.expected(self.mode) - ends[n] for n, further in found.items()]
            misses = [each for each in misses if math.isfinite(each)]
            miss = median(misses or [0.0])
            shared = deviation / math.sqrt(len(misses)) if misses else 0.0
            for number in (n for n, at in epochs.items() if at == epoch):
                past = [value for at, value in sorted(full[number].items()) if at <= epoch and math.isfinite(value)]
                so_far = past[rank(past, self.mode)[0]] if past and self.keep == "best" else None
                if number in over:
                    found[number] = Outlook(so_far, full[number].get(epoch, math.nan), 0.0)
                else:
                    found[number] = Outlook(so_far, ends[number] + miss, deviation, shared)
        return {number: found[number] for number in epochs}

    def _forecast(
        self, epoch: int, epochs: Mapping[int, int], full: Mapping[int, Curve], narrow: Mapping[int, Curve]
    ) -> tuple[dict[int, float], float]:
        """What all that reached an epoch were expected to score in the end, and the deviation of that."""
        scores = {n: full[n].get(epoch, math.nan) for n, at in epochs.items() if at >= epoch}
        if epoch >= self.max_t:
            return scores, 0.0
        last = min((max(narrow.get(n, {}), default=0) for n in epochs), default=0)
        ended = [n for n in scores if epochs[n] >= self.max_t]
        ends = dict(scores)
        if last > epoch:
            curves = {n: (scores[n], narrow[n].get(epoch, math.nan), narrow[n].get(last, math.nan)) for n in scores}
            known = {n: values for n, values in curves.items() if all(map(math.isfinite, values))}
            changes, share = [then - now for _, now, then in known.values()], self._share(epoch, epoch, last)
            alike = median(changes) if changes else 0.0
            ends = {n: score + alike for n, score in scores.items()} | blended(known, 1 - epoch / self.max_t)
        elif ended:
            changes, share = [full[n].get(self.max_t, math.nan) - scores[n] for n in ended], 1.0
        else:
            before = epoch // 2
            changes = [score - full[n].get(before, math.nan) for n, score in scores.items()]
            share = self._share(epoch, before, epoch) if before else math.inf
        changes = [change for change in changes if math.isfinite(change)]
        if not changes:
            return ends, math.inf
        return ends, ERROR * share * math.sqrt(fmean(change**2 for change in changes))

    def _share(self, epoch: int, since: int, until: int) -> float:
        """What scores change by from an epoch to the end, over what they change by between two others.

        They change about evenly in the logarithm of epochs.
        """
        return math.log(self.max_t / epoch) / math.log(until / since)


def blended(curves: Mapping[int, tuple[float, float, float]], left: float) -> dict[int, float]:
    """Expected ends, from each trial's score, its surrogate's at the same epoch, and its surrogate's in the end.

    All together change as their surrogates did: at the median, which one that is far off does not shift. Among them,
    two forecasts are weighed by how much of the training is left: where the surrogate ended, plus half of how far the
    trial is ahead of it; and where the trial is, plus half of what its surrogate still changed by. Half, as either
    curve's noise would count in full otherwise: on recorded trainings ends lie nearer to this than to score plus whole
    change, on each task and after each share of it.

    >>> blended({0: (0.5, 0.8, 0.6), 1: (0.7, 0.8, 0.7)}, left=0.5)
    {0: 0.3375, 1: 0.5625}
    """
    level = median(score + then - now for score, now, then in curves.values()) if curves else 0.0
    middle = [median(values) for values in zip(*curves.values())]
    ends = {}
    for n, values in curves.items():
        score, now, then = (value - mid for value, mid in zip(values, middle))
        surrogate, own = then + (score - now) / 2, score + (then - now) / 2
        ends[n] = level + left * surrogate + (1 - left) * own
    return ends


def chances(outlooks: Mapping[int, Outlook], mode: Mode) -> dict[int, float]:
    """Each trial's probability of being the best; they add up to 1, but for 0 for each that diverged.

    Where nothing is known of what one of them has left, all are alike.

    >>> chances({3: Outlook(None, 0.5, 0.1), 5: Outlook(None, 0.5, 0.1), 6: Outlook(None, math.nan, 0.1)}, "min")
    {3: 0.5, 5: 0.5, 6: 0.0}
    """
    running = {n: found for n, found in outlooks.items() if math.isfinite(found.end)}
    if any(math.isinf(found.deviation) for found in running.values()):
        wins = dict.fromkeys(running, 1.0)
    else:
        shifts = _SHIFTS if any(found.shared for found in running.values()) else (0.0,)
        together = [{n: replace(f, end=f.end + shift * f.shared) for n, f in running.items()} for shift in shifts]
        wins = {n: fmean(_wins(n, each, 1.0 if mode == "max" else -1.0) for each in together) for n in running}
    total = sum(wins.values())
    return {n: wins[n] / total if n in wins else 0.0 for n in outlooks}


def _wins(number: int, outlooks: Mapping[int, Outlook], sign: float) -> float:
    """The mean, over quantiles of what a trial may come to, of the probability that no other one does better."""
    own = outlooks[number]
    values = [sign * own.end + own.deviation * z for z in (_QUANTILES if own.deviation else (0.0,))]
    if own.so_far is not None:
        values = [max(value, sign * own.so_far) for value in values]
    others = [found for n, found in outlooks.items() if n != number]
    return fmean(math.prod(_no_better(found, value, sign) for found in others) for value in values)


def _no_better(found: Outlook, value: float, sign: float) -> float:
    """The probability that a trial comes to no more than a value."""
    if found.so_far is not None and sign * found.so_far > value:
        return 0.0
    if not found.deviation:
        return float(sign * found.end <= value)
    return NormalDist(sign * found.end, found.deviation).cdf(value)


def expected_gain(outlooks: Sequence[Outlook], mode: Mode) -> float:
    """What training one more configuration would be expected to improve the best score by, were it one of these.

    Another draw of one distribution beats the best of k in one of k + 1 cases, and then by about as much as the best
    beats the second (exactly so where the tail is exponential). The next configuration of a sweep is likelier to be
    worse: this is a bound rather than an estimate. NaN for fewer than two.

    >>> expected_gain([Outlook(None, end, 0.0) for end in (0.5, 0.625, 0.75)], "max")
    0.03125
    """
    sign = 1.0 if mode == "max" else -1.0
    ends = sorted((sign * found.expected(mode) for found in outlooks if math.isfinite(found.end)), reverse=True)
    return (ends[0] - ends[1]) / (len(ends) + 1) if len(ends) > 1 else math.nan
