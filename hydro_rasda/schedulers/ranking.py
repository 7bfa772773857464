"""One order of trials for all schedulers, and a test of how far two rankings of the finalists agree.

The order is the same on every machine and for every seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import NormalDist, correlation
from typing import Literal, TypeVar

from hydro_rasda.common.argument_checks import check_mode

Mode = Literal["min", "max"]
TrialT = TypeVar("TrialT", int, str)


def rank(scores: Sequence[float], mode: Mode) -> list[int]:
    """Return the indices of `scores`, best first.

    Scores that are not finite come last in both modes, because they belong to diverged trials. Scores that are equal or
    not finite keep the order of their indices.

    >>> rank([0.3, float("nan"), 0.1, 0.3], "min")
    [2, 0, 3, 1]
    """
    check_mode(mode)
    sign = 1.0 if mode == "min" else -1.0

    def key(index: int) -> tuple[bool, float]:
        finite = math.isfinite(scores[index])
        return (not finite, sign * scores[index] if finite else 0.0)

    return sorted(range(len(scores)), key=key)


def ranked(scores: Mapping[TrialT, float], mode: Mode) -> list[TrialT]:
    """Return the trials of `scores`, best first, in the order of `rank`."""
    trials = list(scores)
    return [trials[i] for i in rank([*scores.values()], mode)]


LEVEL = 0.05
"""`agreement` gives a verdict if chance alone yields such a correlation with at most this probability."""

_ENUMERATED = 7
"""Largest number of trials for which all orders are enumerated: 7 trials have 5,040 orders."""


@dataclass(frozen=True)
class Agreement:
    """The agreement between two rankings of the finalists: by their full-size models, and by their surrogates.

    Finalists are the best of all surrogates and lie close together. So their order says less than the order of all
    surrogates. With fewer than four finalists, no order is rare enough for a verdict. With four, two of the 24 orders
    are rare enough: the same order and the reversed order.

    Attributes:
        epoch: The last epoch that all finalists reached at full size. Scores are measured after it. If surrogates
            trained fewer epochs, their scores are measured after their own last epoch.
        scores: Maps each trial to two scores: of its surrogate, and of its full-size model. NaN if that model diverged.
        rho: Spearman's rank correlation; NaN if all trials are equal on surrogates or at full size.
        by_chance: Probability that chance alone yields a correlation of the same sign that is at least as strong.
            Chance makes all orders at full size equally likely. The probability is exact for up to 7 trials, and a
            normal approximation for more. NaN if `rho` is NaN.
        verdict: "agree" or "disagree", by the sign of `rho`, if `by_chance` is at most 0.05; else "open".
    """

    epoch: int
    scores: Mapping[int, tuple[float, float]]
    rho: float
    by_chance: float
    verdict: Literal["agree", "disagree", "open"]


def agreement(epoch: int, scores: Mapping[int, tuple[float, float]], mode: Mode) -> Agreement:
    """Compare the ranking of trials by the first score of each with that by the second; see `Agreement`.

    >>> agreement(1, {0: (0.1, 0.5), 3: (0.2, 0.6), 5: (0.3, 0.7), 8: (0.4, 0.8)}, "min").by_chance == 1 / 24
    True
    >>> agreement(1, {0: (0.1, 0.5), 3: (0.2, 0.6), 5: (0.3, 0.8), 8: (0.4, 0.7)}, "min").verdict
    'open'
    """
    narrow, full = (_ranks([pair[i] for pair in scores.values()], mode) for i in range(2))
    if len(set(narrow)) < 2 or len(set(full)) < 2:
        return Agreement(epoch, dict(scores), math.nan, math.nan, "open")
    rho = correlation(narrow, full)
    by_chance = _by_chance(narrow, full, rho)
    verdict: Literal["agree", "disagree"] = "agree" if rho > 0 else "disagree"
    return Agreement(epoch, dict(scores), rho, by_chance, verdict if by_chance <= LEVEL else "open")


def _ranks(values: Sequence[float], mode: Mode) -> list[float]:
    """Return ranks, 0 for the best. Values that are equal share their mean rank; diverged trials share the worst."""
    losses = [(value if mode == "min" else -value) if math.isfinite(value) else math.inf for value in values]
    return [(sum(v < own for v in losses) + sum(v <= own for v in losses) - 1) / 2 for own in losses]


def _by_chance(narrow: Sequence[float], full: Sequence[float], rho: float) -> float:
    if len(full) > _ENUMERATED:
        return 1 - NormalDist().cdf(abs(rho) * math.sqrt(len(full) - 1))
    sign = math.copysign(1, rho)
    found = [sign * sum(a * b for a, b in zip(narrow, order)) for order in permutations(full)]
    return sum(value >= found[0] - 1e-9 for value in found) / len(found)
