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
from itertools import product
from statistics import median, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hydro_rasda.checks import is_number
from hydro_rasda.schedulers.population import PopulationBasedTraining, Range
from hydro_rasda.schedulers.sweep_state import SweepState

Floats = NDArray[np.float64]
MOST_GAINS = 256
"""Intervals of trials that the process learns from; the latest ones count, as it forgets."""
MOST_SPREADS = 3.0
"""Standard deviations that a value counts as apart from the median at most: a trial that diverged is so far behind."""
LENGTHS, FORGETTING, NOISES = (0.1, 0.2, 0.4, 0.8), (0.0, 0.05, 0.2, 0.5), (0.03, 0.1, 0.3, 1.0)
CANDIDATES, RADII = 256, (0.1, 0.02, 0.004)
"""Points that are compared in the whole space, and then at these distances from the best."""
_ANYWHERE = 1e9


def check_scikit_learn() -> None:
    """Refuse to go on without the library of the Gaussian process.

    Raises:
        ImportError: If it is missing; the message says what to install.
    """
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
    bandit = TimeVaryingBandit(
        np.array([_point(gain.config, ranges) for gain in learned]),
        np.array([gain.before for gain in learned]),
        np.array([time[gain.start] for gain in learned]),
        np.array([gain.gain for gain in learned]),
        float(len(starts)),
    )
    standing = {n: trial for n, trial in sweep.waiting.items() if math.isfinite(trial.score)}
    sign = -1.0 if sweep.mode == "min" else 1.0
    before = dict(zip(standing, standardized([sign * trial.score for trial in standing.values()])))
    staying = [n for n, trial in standing.items() if n not in replaced and _has(trial.config, ranges)]
    bandit.expect([_point(standing[n].config, ranges) for n in staying], [before[n] for n in staying])
    found: dict[int, dict[str, float]] = {}
    for number, source in sources.items():
        point = bandit.suggest(before[source], int(next(draws[number]) * 2**53))
        bandit.expect([point], [before[source]])
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


class TimeVaryingBandit:
    """Suggest points of the unit cube by an upper confidence bound on a function that changes with time.

    The kernel of the Gaussian process is that of PB2: an isotropic squared exponential, times `(1 - e) ** (|t - t'| /
    2)`. Its length scale, `e` and the noise are those of a grid with the highest marginal likelihood.

    Args:
        points: Observed points: [N, D].
        before: A further input, which is given rather than suggested: [N].
        times: Of the observations: [N].
        values: The function there: [N].
        now: The time of the suggestions.
    """

    def __init__(self, points: Floats, before: Floats, times: Floats, values: Floats, now: float) -> None:
        self._dimensions, self._now = points.shape[1], now
        self._inputs = np.column_stack([points, _to_share(before), times])
        self._values = (values - values.mean()) / (values.std() or 1.0)
        grid = product(LENGTHS, FORGETTING, NOISES)
        self._chosen = max(grid, key=lambda of: self._process(*of).log_marginal_likelihood_value_)
        self._model = self._process(*self._chosen)
        self._confidence = math.sqrt(0.2 + max(0.0, math.log(0.4 * len(values))))

    def expect(self, points: Sequence[Sequence[float]], before: Sequence[float]) -> None:
        """Take into account that these points will be observed now: their variance falls, no mean changes."""
        if points:
            inputs = self._now_at(np.array(points), np.array(before))
            self._values = np.append(self._values, self._model.predict(inputs))
            self._inputs = np.vstack([self._inputs, inputs])
            self._model = self._process(*self._chosen)

    def bound(self, points: Floats, before: float) -> Floats:
        """Return the upper confidence bound at points: [M, D] to [M]."""
        mean, deviation = self._model.predict(self._now_at(points, np.full(len(points), before)), return_std=True)
        bound: Floats = mean + self._confidence * deviation
        return bound

    def suggest(self, before: float, seed: int) -> list[float]:
        """Return the point with the highest bound, as far as candidates drawn with this seed come near it."""
        generator = np.random.default_rng(seed)
        points = generator.random((CANDIDATES, self._dimensions))
        for radius in RADII:
            best = points[self.bound(points, before).argmax()]
            around = best + radius * generator.standard_normal(points.shape)
            points = np.vstack([best, np.clip(around, 0.0, 1.0)])
        found: list[float] = points[self.bound(points, before).argmax()].tolist()
        return found

    def _now_at(self, points: Floats, before: Floats) -> Floats:
        return np.column_stack([points, _to_share(before), np.full(len(points), self._now)])

    def _process(self, length: float, forgetting: float, noise: float) -> Any:
        """Fit the process with these settings to all observations."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF, Matern

        lasts = -2 / math.log(1 - forgetting) if forgetting else _ANYWHERE
        still = [_ANYWHERE] * (self._dimensions + 1)
        # A kernel of scikit-learn's sees all inputs: those with a huge length scale do not matter to it.
        kernel = RBF([length] * (self._dimensions + 1) + [_ANYWHERE]) * Matern([*still, lasts], nu=0.5)
        return GaussianProcessRegressor(kernel, alpha=noise, optimizer=None).fit(self._inputs, self._values)


def _to_share(before: Floats) -> Floats:
    shares: Floats = (before + MOST_SPREADS) / (2 * MOST_SPREADS)
    return shares
