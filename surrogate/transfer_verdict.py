"""Judge how well scores at one width rank configurations at another, and name hyperparameters that may not transfer.

Plain statistics, no tensors. A score is the number that the tuner minimizes or maximizes, one for each configuration. A
diverged trial has a score that is NaN or infinite. All such scores count as equal, and as worse than any other score.

Tensor Programs V, table 1: hyperparameters of optimization transfer. The best regularization depends on the
model's size, too, because a narrow model overfits less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, KeysView, Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation
from typing import Literal

from surrogate.argument_checks import check_int, check_width_ratio, is_metric, require

Mode = Literal["min", "max"]
Verdict = Literal["trusted", "doubtful", "refused"]

TRUSTED_RHO, REFUSED_RHO = 0.8, 0.4
_FEWEST = 4


@dataclass(frozen=True)
class RankComparison:
    """Agreement of two widths over the same configurations.

    Attributes:
        rho: Spearman's rank correlation; NaN if one width gives all configurations the same rank.
        regret: `regret[k]` compares scores at the wide width. It tells how much worse the best of the narrow model's
            top k is than the best of all configurations. 0 is perfect. Infinite if all of the top k diverged at either
            width. NaN if all configurations diverged at the wide width.
        tolerance: A regret up to this value counts as 0, for example the seed-to-seed spread of the wide model.
        top_k: Number of configurations that move on to the wide model.
        verdict: `"trusted"`: rho is at least 0.8 and the regret of the top k is within the tolerance.
            `"refused"`: rho is below 0.4 or undefined, and the regret exceeds the tolerance or is NaN.
            `"doubtful"`: in between.
        advice: The next thing to do, in one sentence.
    """

    rho: float
    regret: dict[int, float]
    tolerance: float
    top_k: int
    verdict: Verdict
    advice: str


def compare_rankings(
    narrow: Sequence[float], wide: Sequence[float], *, mode: Mode = "min", top_k: int = 3, tolerance: float = 0.0
) -> RankComparison:
    """Judge whether the narrow model's scores may choose configurations for the wide one.

    Args:
        narrow: One score for each configuration, at the narrow width.
        wide: The scores of the same configurations, in the same order, at the wide width.
        mode: `"min"` if a smaller score is better, `"max"` if a larger one is.
        top_k: Number of configurations that move on to the wide model, from 1 to all.
        tolerance: A regret up to this counts as 0. The seed-to-seed spread of the wide model is a good choice.

    Raises:
        ValueError: if the lists differ in length or hold fewer than 4 scores, or `mode`, `top_k` or `tolerance` is
            out of range.

    >>> compare_rankings([1, 2, 3, 4], [10, 20, 40, 30]).rho
    0.8
    """
    for name, scores in (("narrow", narrow), ("wide", wide)):
        require(isinstance(scores, Sequence) and not isinstance(scores, str | bytes), name, scores, "a list of scores")
        for i, score in enumerate(scores):
            require(is_metric(score), f"{name}[{i}]", score, "a number")
    if len(narrow) != len(wide) or len(narrow) < _FEWEST:
        raise ValueError(
            f"`narrow` and `wide` have {len(narrow)} and {len(wide)} scores, but must have equally many, at least "
            f"{_FEWEST}"
        )
    check_comparison(len(narrow), mode, top_k, tolerance)
    losses_narrow, losses_wide = _losses(narrow, mode), _losses(wide, mode)
    rho = spearman(losses_narrow, losses_wide)
    regret = {k: _regret(losses_narrow, losses_wide, k) for k in sorted({1, 2, 3, top_k})}
    verdict = _verdict(rho, regret[top_k], tolerance)
    return RankComparison(rho, regret, tolerance, top_k, verdict, _ADVICE[verdict])


def check_comparison(count: int, mode: object, top_k: object, tolerance: object) -> None:
    """Raise ValueError for arguments with which `compare_rankings` cannot compare `count` configurations."""
    require(isinstance(mode, str) and mode in ("min", "max"), "mode", mode, "'min' or 'max'")
    check_int("top_k", top_k, at_least=1, at_most=count)
    require(is_metric(tolerance) and tolerance >= 0, "tolerance", tolerance, "a number >= 0")


_ADVICE: dict[Verdict, str] = {
    "trusted": "The surrogate ranks configurations like the target.",
    "doubtful": "Widen the surrogate (a larger width ratio), or raise top_k, so that good configurations are not lost.",
    "refused": "The surrogate's ranking says little about the target's: tune at full width, or widen the surrogate.",
}


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation: Pearson's correlation of the ranks. Tied values have the mean of their ranks.

    Returns:
        A number in [-1, 1]; NaN if either list is constant.

    >>> spearman([1, 2, 3], [3, 2, 1])
    -1.0
    """
    return math.nan if len({*a}) == 1 or len({*b}) == 1 else correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 0; tied values have the mean of their places."""
    order = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(order)))}
    last = {value: place for place, value in enumerate(order)}
    return [(first[value] + last[value]) / 2 for value in values]


def _losses(scores: Sequence[float], mode: Mode) -> list[float]:
    sign = 1.0 if mode == "min" else -1.0
    return [sign * score if math.isfinite(score) else math.inf for score in scores]


def _regret(narrow: Sequence[float], wide: Sequence[float], k: int) -> float:
    best = min(wide)
    if math.isinf(best):
        return math.nan
    chosen = sorted((i for i in range(len(narrow)) if math.isfinite(narrow[i])), key=lambda i: narrow[i])[:k]
    return min((wide[i] for i in chosen), default=math.inf) - best


def _verdict(rho: float, regret: float, tolerance: float) -> Verdict:
    close = regret <= tolerance
    if rho >= TRUSTED_RHO and close:
        return "trusted"
    if not rho >= REFUSED_RHO and not close:
        return "refused"
    return "doubtful"


SAFE_RATIO = 1 / 4
"""Below this width ratio, regularization tuned on a surrogate is doubtful."""

_REGULARIZERS = ("dropout", "drop_path", "droppath", "weight_decay", "label_smoothing", "mixup", "cutmix", "augment")


def doubtful_hyperparameters(keys: Collection[str], width_ratio: float) -> list[str]:
    """List the tuned hyperparameters whose best value may differ between surrogate and target.

    Args:
        keys: Names in the search space; nested ones joined by any separator, such as `"model/dropout"`.
        width_ratio: Surrogate width over target width, in (0, 1].

    Returns:
        The doubtful keys, in their order; none at a ratio of 1/4 or more.

    Raises:
        ValueError: if `keys` is no list of names, or `width_ratio` no number in (0, 1].

    >>> doubtful_hyperparameters(["lr", "dropout", "weight_decay"], 1 / 8)
    ['dropout', 'weight_decay']
    >>> doubtful_hyperparameters(["lr", "dropout", "weight_decay"], 1 / 2)
    []
    """
    check_width_ratio(width_ratio)
    listed = isinstance(keys, list | tuple | set | frozenset | Mapping | KeysView)
    require(listed and all(isinstance(key, str) for key in keys), "keys", keys, "a list of names")
    if width_ratio >= SAFE_RATIO:
        return []
    return [key for key in keys if any(word in key.lower() for word in _REGULARIZERS)]
