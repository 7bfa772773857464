"""What trials report and what they cost: learning curves as one table, wherever they come from.

Shapes: N trials, T epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hydro_rasda.checks import check_int, check_mode
from hydro_rasda.schedulers import Mode

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """A search space, sampled.

    Attributes:
        scores: [N, T], the metric of trial i after epoch t + 1; NaN where it diverged.
        work: [N], cost of an epoch of trial i over that of the cost model.
        mode: "min" where a lower score is better, "max" where a higher is.

    Raises:
        ValueError: shapes do not agree, ``work`` is not positive, or ``mode`` is unknown.
    """

    scores: Floats
    work: Floats
    mode: Mode = "min"

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if self.scores.ndim != 2 or 0 in self.scores.shape:
            raise ValueError(f"`scores` has shape {self.scores.shape}, but must be [trials, epochs], none of them 0")
        if self.work.shape != self.scores.shape[:1]:
            raise ValueError(f"`work` has shape {self.work.shape}, but must be {self.scores.shape[:1]}")
        if not (self.work > 0).all():
            raise ValueError(f"`work` goes down to {self.work.min()}, but must be > 0")

    @property
    def trials(self) -> int:
        """N."""
        return int(self.scores.shape[0])

    @property
    def epochs(self) -> int:
        """T."""
        return int(self.scores.shape[1])

    def best(self, t: int) -> float:
        """The best score that any trial has after epoch ``t``; NaN where none is finite."""
        column = self.scores[np.isfinite(self.scores[:, t - 1]), t - 1]
        return float((column.min() if self.mode == "min" else column.max()) if column.size else np.nan)

    def resampled(self, trials: int, seed: int) -> Workload:
        """``trials`` trials drawn from this table: all of them where it has as many, with repetition beyond."""
        check_int("trials", trials, at_least=1)
        rng = np.random.default_rng(seed)
        whole = [rng.permutation(self.trials) for _ in range(-(-trials // self.trials))]
        chosen = np.concatenate(whole)[:trials]
        return Workload(self.scores[chosen], self.work[chosen], self.mode)


def power_law(trials: int, epochs: int, seed: int, noise: float = 0.01, work_spread: float = 0.0) -> Workload:
    r"""Curves :math:`a + b \cdot t^{-c}` with noise: a parametric family where no data are at hand.

    Domhan et al., "Speeding up automatic hyperparameter optimization ... by extrapolation of learning curves" (2015),
    call it pow3.

    Args:
        trials: N.
        epochs: T.
        seed: Draws a from U(0.1, 1), b from U(0.5, 2), c from U(0.2, 1), noise and work.
        noise: Standard deviation of a score.
        work_spread: Standard deviation of the logarithm of ``work``.
    """
    check_int("trials", trials, at_least=1)
    check_int("epochs", epochs, at_least=1)
    rng = np.random.default_rng(seed)
    a, b, c = rng.uniform(0.1, 1.0, trials), rng.uniform(0.5, 2.0, trials), rng.uniform(0.2, 1.0, trials)
    t = np.arange(1, epochs + 1)
    scores = a[:, None] + b[:, None] * t ** -c[:, None] + noise * rng.standard_normal((trials, epochs))
    return Workload(scores, np.exp(work_spread * rng.standard_normal(trials)), "min")
