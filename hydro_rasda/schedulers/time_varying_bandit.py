"""A bandit over the unit cube whose function changes with time, by scikit-learn's Gaussian process (PB2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern

Floats = NDArray[np.float64]
LENGTHS, FORGETTING, NOISES = (0.1, 0.2, 0.4, 0.8), (0.0, 0.05, 0.2, 0.5), (0.03, 0.1, 0.3, 1.0)
CANDIDATES, RADII = 256, (0.1, 0.02, 0.004)
"""Points that are compared in the whole space, and then at these distances from the best."""
_ANYWHERE = 1e9


class TimeVaryingBandit:
    """Suggest points of the unit cube by an upper confidence bound on a function that changes with time.

    The kernel of the Gaussian process is that of PB2: an isotropic squared exponential, times `(1 - e) ** (|t - t'| /
    2)`. Its length scale, `e` and the noise are those of a grid with the highest marginal likelihood.

    Args:
        points: Observed points: [N, D].
        before: A further input in [0, 1], which is given rather than suggested: [N].
        times: Of the observations: [N].
        values: The function there: [N].
        now: The time of the suggestions.
    """

    def __init__(self, points: ArrayLike, before: ArrayLike, times: ArrayLike, values: ArrayLike, now: float) -> None:
        seen, observed = np.asarray(points), np.asarray(values)
        self._dimensions, self._now = seen.shape[1], now
        self._inputs = np.column_stack([seen, before, times])
        self._values = (observed - observed.mean()) / (observed.std() or 1.0)
        grid = product(LENGTHS, FORGETTING, NOISES)
        self._chosen = max(grid, key=lambda of: self._process(*of).log_marginal_likelihood_value_)
        self._model = self._process(*self._chosen)
        self._confidence = math.sqrt(0.2 + max(0.0, math.log(0.4 * len(observed))))

    def expect(self, points: Sequence[Sequence[float]], before: Sequence[float]) -> None:
        """Take into account that these points will be observed now: their variance falls, no mean changes."""
        if points:
            inputs = self._now_at(np.array(points), before)
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

    def _now_at(self, points: Floats, before: ArrayLike) -> Floats:
        return np.column_stack([points, before, np.full(len(points), self._now)])

    def _process(self, length: float, forgetting: float, noise: float) -> Any:
        """Fit the process with these settings to all observations."""
        lasts = -2 / math.log(1 - forgetting) if forgetting else _ANYWHERE
        still = [_ANYWHERE] * (self._dimensions + 1)
        # A kernel of scikit-learn's sees all inputs: those with a huge length scale do not matter to it.
        kernel = RBF([length] * (self._dimensions + 1) + [_ANYWHERE]) * Matern([*still, lasts], nu=0.5)
        return GaussianProcessRegressor(kernel, alpha=noise, optimizer=None).fit(self._inputs, self._values)
