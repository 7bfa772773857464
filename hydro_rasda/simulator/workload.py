"""Scores and costs of trials: a table of learning curves from any source.

Shapes: N trials, T epochs.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hydro_rasda.common.argument_checks import check_int, check_mode, is_number, require
from hydro_rasda.schedulers import Mode

_MOST, _WIDEST = 10**8, 100

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """Trials with their learning curves, as arrays or as values that `numpy.asarray` accepts.

    Attributes:
        scores: [N, T], the score of trial i after epoch t + 1; NaN if it had diverged.
        work: [N], time of the training steps of trial i, relative to the steps of the cost model.
        mode: "min" if a lower score is better, "max" if a higher one is.

    Raises:
        ValueError: if an argument is not an array of numbers, shapes differ, `work` is not finite and positive, or
            `mode` is unknown.
    """

    scores: Floats
    work: Floats
    mode: Mode = "min"

    def __post_init__(self) -> None:
        check_mode(self.mode)
        for name in ("scores", "work"):
            object.__setattr__(self, name, _array(name, getattr(self, name)))
        if self.scores.ndim != 2 or 0 in self.scores.shape:
            raise ValueError(f"`scores` has shape {self.scores.shape}, but must be [trials, epochs], none of them 0")
        if self.work.shape != self.scores.shape[:1]:
            raise ValueError(f"`work` has shape {self.work.shape}, but must be {self.scores.shape[:1]}")
        if not (np.isfinite(self.work) & (self.work > 0)).all():
            raise ValueError(f"`work` is {self.work}, but must be finite and > 0")

    @property
    def trials(self) -> int:
        """Number of trials N."""
        return int(self.scores.shape[0])

    @property
    def epochs(self) -> int:
        """Number of epochs T."""
        return int(self.scores.shape[1])

    def best(self, t: int) -> float:
        """Return the best score of all trials in epoch `t` (1 to T); NaN if no score is finite."""
        require(1 <= t <= self.epochs, "t", t, f"an epoch from 1 to {self.epochs}")
        column = self.scores[np.isfinite(self.scores[:, t - 1]), t - 1]
        return float((column.min() if self.mode == "min" else column.max()) if column.size else np.nan)

    def resampled(self, trials: int, seed: int) -> Workload:
        """Return a workload of trials drawn from this one. No trial is drawn twice before all were drawn once."""
        check_int("trials", trials, at_least=1)
        rng = np.random.default_rng(seed)
        whole = [rng.permutation(self.trials) for _ in range(-(-trials // self.trials))]
        chosen = np.concatenate(whole)[:trials]
        return Workload(self.scores[chosen], self.work[chosen], self.mode)


def _array(name: str, value: object) -> Floats:
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{name}` is {reprlib.repr(value)}, but must be an array of numbers") from error


def power_law(trials: int, epochs: int, seed: int, noise: float = 0.01, work_spread: float = 0.0) -> Workload:
    """Return noisy curves `a + b * t**-c` with random a, b and c, as a replacement for measured curves.

    Domhan et al., "Speeding up automatic hyperparameter optimization ... by extrapolation of learning curves" (2015),
    call them pow3.

    Args:
        seed: Seed of the random draws: a from U(0.1, 1), b from U(0.5, 2), c from U(0.2, 1), noise and work.
        noise: Standard deviation of a score.
        work_spread: Standard deviation of the logarithm of `work`.
    """
    check_int("trials", trials, at_least=1, at_most=_MOST)
    check_int("epochs", epochs, at_least=1, at_most=_MOST)
    check_int("seed", seed, at_least=0)
    for name, value in (("noise", noise), ("work_spread", work_spread)):
        require(is_number(value) and 0 <= value <= _WIDEST, name, value, f"a number from 0 to {_WIDEST}")
    rng = np.random.default_rng(seed)
    a, b, c = rng.uniform(0.1, 1.0, trials), rng.uniform(0.5, 2.0, trials), rng.uniform(0.2, 1.0, trials)
    t = np.arange(1, epochs + 1)
    scores = a[:, None] + b[:, None] * t ** -c[:, None] + noise * rng.standard_normal((trials, epochs))
    return Workload(scores, np.exp(work_spread * rng.standard_normal(trials)), "min")
