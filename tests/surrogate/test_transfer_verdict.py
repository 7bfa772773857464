""" """

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from surrogate import compare_rankings, doubtful_hyperparameters
from surrogate.transfer_verdict import spearman


@pytest.mark.parametrize("seed", range(5))
def test_spearman_equals_scipys_with_and_without_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for a, b in [(rng.normal(size=20), rng.normal(size=20)), (rng.integers(5, size=20), rng.integers(5, size=20))]:
        assert spearman(a.tolist(), b.tolist()) == pytest.approx(spearmanr(a, b).statistic)


def test_spearman_of_a_constant_is_undefined() -> None:
    assert math.isnan(spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))


def test_regret_by_hand() -> None:
    """The narrow model's best three are worth 5, 3 and 2 on the wide one, whose best is 2."""
    found = compare_rankings([1, 2, 3, 4, 5], [5, 3, 2, 6, 7])
    assert found.regret == {1: 3, 2: 1, 3: 0}
    assert found.rho == pytest.approx(1 - 6 * (4 + 0 + 4 + 0 + 0) / (5 * 24))  # 1 - 6 sum d^2 / (n (n^2 - 1))


def test_max_mirrors_min() -> None:
    narrow, wide = [0.1, 0.4, 0.3, 0.9], [0.2, 0.3, 0.8, 0.7]
    as_loss = compare_rankings([-x for x in narrow], [-x for x in wide])
    as_score = compare_rankings(narrow, wide, mode="max")
    assert as_score.rho == as_loss.rho
    assert as_score.regret == as_loss.regret


def test_diverged_is_worst_in_both_directions() -> None:
    nan = math.nan
    assert compare_rankings([1, 2, nan, nan], [1, 2, nan, math.inf]).rho == pytest.approx(1.0)
    assert compare_rankings([1, 2, nan, 0], [5, 6, nan, 7], mode="max").regret[1] == 1
    assert compare_rankings([1, 2, 3, 4], [nan, nan, nan, 1], top_k=3).regret[3] == math.inf
    assert math.isnan(compare_rankings([1, 2, 3, 4], [nan] * 4).regret[1])


def test_what_diverged_at_the_narrow_width_is_not_chosen() -> None:
    nan = math.nan
    assert compare_rankings([nan, 2, nan, nan], [1, 5, 3, 4]).regret == {1: 4, 2: 4, 3: 4}
    found = compare_rankings([nan] * 4, [1, 2, 3, 4])
    assert (found.regret[3], found.verdict) == (math.inf, "refused")


@pytest.mark.parametrize(
    ("narrow", "wide", "settings", "verdict"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 5, 4], {}, "trusted"),
        ([1, 2, 3, 4, 5], [3, 1, 2, 5, 4], {}, "doubtful"),  # rho 0.6, though the top 3 hold the best
        ([5, 4, 3, 2, 1], [1, 2, 3, 4, 5], {"top_k": 1}, "refused"),
        ([2, 1, 3, 4, 5], [1, 2, 3, 4, 5], {"top_k": 1}, "doubtful"),  # rho 0.9, but the top 1 is not the best
        ([2, 1, 3, 4, 5], [1, 2, 3, 4, 5], {"top_k": 1, "tolerance": 1.0}, "trusted"),
    ],
)
def test_verdicts(narrow: list[float], wide: list[float], settings: dict[str, Any], verdict: str) -> None:
    found = compare_rankings(narrow, wide, **settings)
    assert found.verdict == verdict
    assert ("top_k" in found.advice) == (verdict == "doubtful")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3, 4], [1, 2, 3]), "`narrow` and `wide` have 4 and 3 scores"),
        (([1, 2, 3], [1, 2, 3]), "must have equally many, at least 4"),
    ],
)
def test_score_errors(arguments: tuple[list[float], list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_rankings(*arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "best"}, "`mode` is 'best', but must be 'min' or 'max'"),
        ({"top_k": 5}, "`top_k` is 5, but must be an integer from 1 to 4"),
        ({"tolerance": -1}, "`tolerance` is -1, but must be a number >= 0"),
    ],
)
def test_setting_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_rankings([1, 2, 3, 4], [1, 2, 3, 4], **settings)


KEYS = ["lr", "model/dropout", "momentum", "weight_decay", "beta1", "label_smoothing", "schedule", "gamma"]


def test_regularizers_below_a_quarter() -> None:
    assert doubtful_hyperparameters(KEYS, 1 / 8) == ["model/dropout", "weight_decay", "label_smoothing"]


def test_none_from_a_quarter_up() -> None:
    assert doubtful_hyperparameters(KEYS, 1 / 4) == []
    assert doubtful_hyperparameters(KEYS, 0.2499) != []
