import math

import pytest

from hydro_rasda.schedulers import SuccessiveHalving, milestones


def test_keeps_one_in_reduction_factor_best_first() -> None:
    scores = {trial: float(trial) for trial in range(27)}
    halving = SuccessiveHalving(milestones(1, 27, 3), 3, "max")
    survivors = halving.promote(scores)
    assert survivors == tuple(range(26, 17, -1))
    assert halving.promote({t: scores[t] for t in survivors}) == (26, 25, 24)


def test_rounds_down_but_keeps_at_least() -> None:
    scores = dict(enumerate([0.4, 0.3, 0.2, 0.1, 0.0]))
    assert SuccessiveHalving((1,), 3, "min").promote(scores) == (4,)  # 5 // 3
    assert SuccessiveHalving((1,), 3, "min", keep_at_least=2).promote(scores) == (4, 3)
    assert SuccessiveHalving((1,), 3, "min", keep_at_least=9).promote(scores) == (4, 3, 2, 1, 0)


def test_what_diverged_is_not_promoted_even_where_places_stay_empty() -> None:
    halving = SuccessiveHalving((1,), 2, "max")
    assert halving.promote({"a": math.nan, "b": 0.1, "c": math.inf, "d": -math.inf}) == ("b",)
    assert halving.promote({"a": math.nan}) == ()
    assert halving.promote({}) == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, 3), 1, "min"), "`reduction_factor` is 1, but must be an integer >= 2"),
        (((1, 3), 3, "least"), "`mode` is 'least'"),
        (((1, 3), 3, "min", 0), "`keep_at_least` is 0, but must be an integer >= 1"),
        (((3, 3), 3, "min"), r"`milestones` is \(3, 3\), but must be positive and strictly increasing"),
        (((0, 3), 3, "min"), r"`milestones` is \(0, 3\)"),
        (((), 3, "min"), r"`milestones` is \(\)"),
    ],
)
def test_bad_input(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuccessiveHalving(*arguments)


def test_before_a_rung_is_complete_one_in_rf_goes_on_however_many_are_to_be_kept() -> None:
    halving = SuccessiveHalving((1, 3, 9), 3, "min", keep_at_least=4)
    scores = {n: float(n) for n in range(7)}
    assert halving.promote(scores, complete=False) == (0, 1)
    assert halving.promote(scores) == (0, 1, 2, 3)
    assert halving.promote({0: 1.0, 1: 2.0}, complete=False) == ()
