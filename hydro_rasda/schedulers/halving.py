"""Synchronous successive halving: a rung is decided once, over all of its trials.

Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization" (2016).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hydro_rasda.checks import check_int, check_mode
from hydro_rasda.schedulers.ranking import Mode, rank

TrialT = TypeVar("TrialT", int, str)


@dataclass(frozen=True)
class SuccessiveHalving:
    """Keep the best `1 / reduction_factor` of a rung.

    It has no state: a decision depends only on the rung's scores.

    Attributes:
        milestones: Training iterations at which a rung ends, strictly increasing (see `milestones`).
        reduction_factor: Of `n` trials, `n // reduction_factor` go on.
        keep_at_least: Trials that go on however few there are.
    """

    milestones: Sequence[int]
    reduction_factor: int
    mode: Mode
    keep_at_least: int = 1

    def __post_init__(self) -> None:
        check_int("reduction_factor", self.reduction_factor, at_least=2)
        check_int("keep_at_least", self.keep_at_least, at_least=1)
        check_mode(self.mode)
        object.__setattr__(self, "milestones", tuple(self.milestones))
        rising = all(a < b for a, b in zip((0, *self.milestones), self.milestones))
        if not self.milestones or not rising:
            raise ValueError(f"`milestones` is {self.milestones}, but must be positive and strictly increasing")

    def promote(self, scores: Mapping[TrialT, float], *, complete: bool = True) -> tuple[TrialT, ...]:
        """Return the trials that continue to the next rung, best first.

        They are `max(keep_at_least, n // reduction_factor)` of the `n` trials, fewer if not enough scores are finite: a
        diverged trial is never promoted. Of equal scores, the lower trial's counts as better, so that the order of
        `scores` does not matter.

        Args:
            complete: True if these are all trials of the rung. Until then, `n // reduction_factor` may continue early,
                so that no device waits for the last of them (ASHA's promotion, Li et al. 2020, Alg. 2).

        >>> SuccessiveHalving((1, 3, 9), 3, "min").promote({3: 0.5, 1: 0.2, 2: 0.2, 0: 0.9})
        (1,)
        """
        trials = sorted(scores)
        values = [scores[trial] for trial in trials]
        count = max(self.keep_at_least if complete else 0, len(trials) // self.reduction_factor)
        return tuple(trials[i] for i in rank(values, self.mode)[:count] if math.isfinite(values[i]))
