"""Whether two widths rank finalists alike, against scipy's numbers."""

from __future__ import annotations

import doctest
import math
import random
import sys
import warnings
from itertools import permutations

import pytest
from scipy import stats

from hydro_rasda.schedulers import agreement, rank

NAN, INF = math.nan, math.inf


def test_best_first_ties_by_the_lower_index() -> None:
    assert rank([0.3, 0.1, 0.3, 0.2], "min") == [1, 3, 0, 2]
    assert rank([0.3, 0.1, 0.3, 0.2], "max") == [0, 2, 3, 1]


def test_what_is_not_finite_is_worst_in_both_modes() -> None:
    scores = [NAN, -INF, 1.0, INF, 0.0]
    assert rank(scores, "min") == [4, 2, 0, 1, 3]
    assert rank(scores, "max") == [2, 4, 0, 1, 3]


def test_max_mirrors_min() -> None:
    scores = [random.Random(0).choice([0.0, 0.5, 1.0, NAN, INF]) for _ in range(50)]
    assert rank(scores, "min") == rank([-s for s in scores], "max")


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="`mode` is 'best', but must be 'min' or 'max'"):
        rank([1.0], "best")  # type: ignore[arg-type]


def test_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(sys.modules[agreement.__module__])
    assert (outcome.failed, outcome.attempted > 0) == (0, True)


@pytest.mark.parametrize("count", [2, 4, 6, 12])
def test_the_correlation_is_spearmans_with_ties(count: int) -> None:
    draw = random.Random(count)
    for _ in range(20):
        pairs = {n: (float(draw.randrange(5)), float(draw.randrange(5))) for n in range(count)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", stats.ConstantInputWarning)
            known = stats.spearmanr(*zip(*pairs.values())).statistic
        assert agreement(1, pairs, "min").rho == pytest.approx(known, nan_ok=True)


def test_what_chance_gives_is_counted_over_all_orders() -> None:
    """Of five, 1, 5, 8 and 14 of 120 orders have a correlation of at least 1, .9, .8 and .7: a verdict needs .9."""
    found = [agreement(1, dict(enumerate(zip(range(5), order))), "min") for order in permutations(range(5))]
    likely = {round(each.rho, 1): (round(120 * each.by_chance), each.verdict) for each in found}
    assert [likely[rho] for rho in (1.0, 0.9, 0.8, 0.7)] == [(1, "agree"), (5, "agree"), (8, "open"), (14, "open")]
    assert [likely[-rho] for rho in (1.0, 0.9, 0.8)] == [(1, "disagree"), (5, "disagree"), (8, "open")]


@pytest.mark.slow
def test_beyond_what_is_counted_the_normal_approximation_is_near() -> None:
    draw = random.Random(0)
    for _ in range(10):
        full = draw.sample(range(8), 8)
        found = agreement(1, dict(enumerate(zip(range(8), full))), "min")
        exact = stats.permutation_test(
            (full,),
            lambda order: stats.spearmanr(range(8), order).statistic,
            permutation_type="pairings",
            alternative="greater" if found.rho > 0 else "less",
            n_resamples=2_000,
            rng=0,
        ).pvalue
        assert found.by_chance == pytest.approx(exact, abs=0.05)


def test_what_diverged_is_worst_and_max_mirrors_min() -> None:
    """Trials 1 and 2 share the last place at full size, whichever way is better."""
    scores = {0: (0.1, 0.2), 1: (0.2, math.nan), 2: (0.3, math.inf), 3: (0.4, 0.3)}
    known = stats.spearmanr([0, 1, 2, 3], [0, 2.5, 2.5, 1]).statistic
    mirrored = {n: (-narrow, -full) for n, (narrow, full) in scores.items()}
    for mode, pairs in (("min", scores), ("max", mirrored)):
        assert agreement(1, pairs, mode).rho == pytest.approx(known)  # type: ignore[arg-type]
    assert agreement(1, {0: (0.1, 0.5), 1: (0.2, 0.5)}, "min").verdict == "open"
    assert math.isnan(agreement(1, {0: (0.1, 0.5)}, "min").rho)
