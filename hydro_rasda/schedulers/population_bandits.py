"""Population based bandits (PB2): population based training whose new values a Gaussian process suggests.

Parker-Holder, Nguyen and Roberts, "Provably efficient online hyperparameter optimization with population-based
bandits" (2020). The process models how much a trial improves in an interval, by its hyperparameters and by time. It is
scikit-learn's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median, pstdev
from typing import Any

from hydro_rasda.common.argument_checks import is_number
from hydro_rasda.schedulers.population import PopulationBasedTraining, Range
from hydro_rasda.schedulers.sweep_state import SweepState

MOST_GAINS = 256
"""Intervals of trials that the process learns from; the latest ones count, as it forgets."""
MOST_SPREADS = 3.0
"""Standard deviations that a value counts as apart from the median at most: a trial that diverged is so far behind."""


def check_scikit_learn() -> None:
    """Raise ImportError if the library of the Gaussian process is missing; the message says what to install."""
    if find_spec("sklearn") is None:
        told = "`sweep.rule` 'pb2' needs scikit-learn, which is not there"
        raise ImportError(f"{told}: pip install 'hydro-rasda[pb2]'")


@dataclass(frozen=True)
class PopulationBasedBandits(PopulationBasedTraining):
    """Copy the best trials over the worst, and have a Gaussian process suggest the copies' hyperparameters.

    Selection, copies and lists of values are those of `PopulationBasedTraining`. Values of a `Range` maximize an upper
    confidence bound on the improvement in the next interval. Improvements count by their distance from the median of
    their interval, in robust standard deviations. The process also knows each trial's score before the interval, and
    that other trials are about to train near a point (Desautels et al. 2014). It forgets at a rate of its own.

    Attributes:
        resample: Probability that a value of a list is drawn anew.
        factors: Without effect.

    Raises:
        ImportError: If scikit-learn is missing.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scikit_learn()

    def explore_copies(
        self, sweep: SweepState, sources: Mapping[int, int], draws: Mapping[int, Iterator[float]]
    ) -> dict[int, dict[str, float]]:
        """Return the changed values of each copy's configuration, by the copy's number."""
        changes = super().explore_copies(sweep, sources, draws)
        places: dict[tuple[str, ...], list[int]] = {}
        for number, changed in changes.items():
            keys = tuple(key for key in changed if isinstance(self.explored[key], Range))
            if keys:
                places.setdefault(keys, []).append(number)
        for keys, numbers in places.items():
            ranges = {key: of for key in keys if isinstance(of := self.explored[key], Range)}
            suggested = _suggestions(sweep, ranges, {number: sources[number] for number in numbers}, sources, draws)
            for number, values in suggested.items():
                changes[number] |= values
        return changes


def _suggestions(
    sweep: SweepState,
    ranges: Mapping[str, Range],
    sources: Mapping[int, int],
    replaced: Mapping[int, int],
    draws: Mapping[int, Iterator[float]],
) -> dict[int, dict[str, float]]:
    """Return the values that the bandit suggests for copies, one after the other."""
    learned = [gain for gain in gains_of(sweep) if _has(gain.config, ranges)]
    learned = sorted(learned, key=lambda gain: -gain.start)[:MOST_GAINS]
    starts = sorted({gain.start for gain in learned})
    time = {start: float(place) for place, start in enumerate(starts)}
    # NumPy and scikit-learn are read only where they are needed.
    from hydro_rasda.schedulers.time_varying_bandit import TimeVaryingBandit

    bandit = TimeVaryingBandit(
        [_point(gain.config, ranges) for gain in learned],
        [_to_share(gain.before) for gain in learned],
        [time[gain.start] for gain in learned],
        [gain.gain for gain in learned],
        float(len(starts)),
    )
    standing = {n: trial for n, trial in sweep.waiting.items() if math.isfinite(trial.score)}
    sign = -1.0 if sweep.mode == "min" else 1.0
    before = dict(zip(standing, standardized([sign * trial.score for trial in standing.values()])))
    staying = [n for n, trial in standing.items() if n not in replaced and _has(trial.config, ranges)]
    bandit.expect([_point(standing[n].config, ranges) for n in staying], [_to_share(before[n]) for n in staying])
    found: dict[int, dict[str, float]] = {}
    for number, source in sources.items():
        point = bandit.suggest(_to_share(before[source]), int(next(draws[number]) * 2**53))
        bandit.expect([point], [_to_share(before[source])])
        found[number] = {key: of.at(share) for (key, of), share in zip(ranges.items(), point)}
    return found


def _has(config: Mapping[str, Any], ranges: Mapping[str, Range]) -> bool:
    return all(is_number(config.get(key)) for key in ranges)


def _point(config: Mapping[str, Any], ranges: Mapping[str, Range]) -> list[float]:
    return [of.share(config[key]) for key, of in ranges.items()]


@dataclass(frozen=True)
class Gain:
    """How much a trial improved in an interval, compared with all others.

    Attributes:
        start: Epochs before the interval.
        config: The trial's hyperparameters in it.
        before: The score with which it began, standardized, the higher the better; 0 in the first interval.
        gain: The improvement, standardized.
    """

    start: int
    config: Mapping[str, Any]
    before: float
    gain: float


def gains_of(sweep: SweepState) -> list[Gain]:
    """Return what each trial gained in each interval that it has trained, the copies' since they are copies."""
    sign = -1.0 if sweep.mode == "min" else 1.0
    found: dict[int, list[tuple[Mapping[str, Any], float, float]]] = {}
    for trial in sweep.trials.values():
        ends = [*(later.start for later in trial.intervals[1:]), trial.epoch]
        for interval, end in zip(trial.intervals, ends):
            if end == interval.start:
                continue
            began = trial.number if interval.copy_of is None else interval.copy_of
            before = sign * sweep.scores[interval.start][began] if interval.start else 0.0
            after = sign * sweep.scores[end][trial.number]
            found.setdefault(interval.start, []).append((interval.config, before, after - before))
    gains = list[Gain]()
    for start, of in found.items():
        configs, before, improved = zip(*of)
        gains += [Gain(start, *each) for each in zip(configs, standardized(before), standardized(improved))]
    return gains


def standardized(values: Sequence[float]) -> list[float]:
    """Return distances from the median, in robust standard deviations; what is not finite is farthest below.

    >>> standardized([1.0, 2.0, 3.0, 1000.0, float("nan")])
    [-1.01..., -0.33..., 0.33..., 3.0, -3.0]
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return [0.0] * len(values)
    middle = median(finite)
    spread = 1.4826 * median(abs(value - middle) for value in finite) or pstdev(finite) or 1.0
    most = MOST_SPREADS
    return [min(max((v - middle) / spread, -most), most) if math.isfinite(v) else -most for v in values]


def _to_share(before: float) -> float:
    return (before + MOST_SPREADS) / (2 * MOST_SPREADS)
