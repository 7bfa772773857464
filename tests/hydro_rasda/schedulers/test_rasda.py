"""What a survivor's workers may depend on."""

import math
from dataclasses import replace
from typing import Any

import pytest

from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving, Decision, Growth, efficient, parallel_efficiency


def survivor(**known: Any) -> Growth:
    """It had 2 workers, is due 8, and could have them."""
    plain = Growth(held=2, due=8, base=2, alive=4, capacity=64, seconds={}, free=64, sharing=4)
    return plain._replace(**known)


@pytest.mark.parametrize(
    ("free", "sharing", "workers"), [(32, 4, 8), (31, 4, 4), (16, 4, 4), (15, 4, 2), (0, 4, 2), (8, 1, 8), (8, 0, 8)]
)
def test_the_smaller_of_what_is_due_and_an_even_share(free: int, sharing: int, workers: int) -> None:
    assert efficient(survivor(free=free, sharing=sharing)) == workers


def test_never_fewer_than_it_has() -> None:
    assert efficient(survivor(held=4, due=16, free=4, sharing=9)) == 4
    assert efficient(survivor(held=3, free=4, sharing=1)) == 4  # a node that was down left it 3


@pytest.mark.parametrize("facts", [{}, {"free": 4, "sharing": 2}, {"own": {4: 10.0, 16: 10.0}}])
def test_a_lower_limit_after_a_restore_takes_workers_away(facts: dict[str, Any]) -> None:
    assert efficient(survivor(held=16, due=8, **facts)) == 8


def test_sizes_are_powers_of_the_factor_or_what_is_due() -> None:
    assert efficient(survivor(due=12, free=47, sharing=4), factor=3) == 6
    assert efficient(survivor(due=12, free=48, sharing=4), factor=3) == 12


@pytest.mark.parametrize(("seconds", "workers"), [(51.0, 8), (99.0, 8), (100.0, 4), (120.0, 4)])
def test_grows_while_its_own_epochs_show_more_than_half_the_efficiency(seconds: float, workers: int) -> None:
    """On 2 workers 100 s: 100 s on 4 is an efficiency of a half."""
    assert efficient(survivor(held=4, due=8, own={2: 100.0, 4: seconds})) == workers


def test_the_batch_stays_within_the_noise_scale() -> None:
    assert [efficient(survivor(noise_scale=n)) for n in (1.0, 3.9, 4.0, 7.9, 8.0)] == [2, 2, 4, 4, 8]


def test_what_decides_can_be_moved_or_switched_off() -> None:
    lossy, noisy = survivor(efficiency=0.3), survivor(noise_scale=3.0)
    assert [RASDA(40, grow="efficient", least_efficiency=least).resize(lossy) for least in (0.5, 0.2, 0.0)] == [2, 8, 8]
    assert [RASDA(40, 1, 2, 2, 2, grow="efficient", batch_over_noise=n).resize(noisy) for n in (1, 2, math.inf)] == [
        2,
        4,
        8,
    ]
    stuck = survivor(efficiency=0.0, noise_scale=0.0)
    assert RASDA(40, grow="efficient", least_efficiency=0.0, batch_over_noise=math.inf).resize(stuck) == 2


@pytest.mark.parametrize(("argument", "value"), [("least_efficiency", 1.0), ("batch_over_noise", 0.0)])
def test_bounds_have_rules(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{argument}` is {value}, but must be a number"):
        replace(RASDA(40, grow="efficient"), **{argument: value})  # type: ignore[arg-type]  # one name or the other


def test_parallel_efficiency() -> None:
    assert parallel_efficiency({}, 4) == parallel_efficiency({2: 10.0}, 4) == parallel_efficiency({2: 9.0}, 2) == 1.0
    assert parallel_efficiency({1: 80.0, 2: 50.0, 4: 40.0}, 4) == 0.5


def test_as_due_whatever_is_known() -> None:
    known = survivor(free=0, noise_scale=1.0, own={1: 1.0, 2: 9.0})
    assert RASDA(40).resize(known) == 8
    assert RASDA(40, grow="efficient").resize(known) == 2


def test_the_rule_grows_by_its_own_factor() -> None:
    rule = RASDA(40, scaling_factor=4, grow="efficient")
    assert rule.resize(survivor(held=1, base=1, due=16, free=15, sharing=1)) == 4


def test_figure_7() -> None:
    """Computer vision goes from 2 to 16 workers at 5, 10, 20; additive manufacturing from 8 to 32."""
    vision = RASDA(max_t=40, grace_period=5, workers=2)
    assert vision.milestones == (5, 10, 20, 40)
    assert [vision.workers_at(t) for t in (0, 4, 5, 9, 10, 19, 20, 39, 40)] == [2, 2, 4, 4, 8, 8, 16, 16, 16]
    manufacturing = RASDA(max_t=20, grace_period=5, workers=8)
    assert [manufacturing.workers_at(t) for t in (0, 5, 10)] == [8, 16, 32]


def test_time_and_space_have_factors_of_their_own() -> None:
    """Equation 3 spaces the milestones by the scaling factor; Algorithm 1 grows the workers by it."""
    rule = RASDA(max_t=48, grace_period=3, reduction_factor=3, scaling_factor=4, workers=2)
    assert rule.milestones == (3, 12, 48)
    assert [rule.workers_at(t) for t in (0, 2, 3, 11, 12, 48)] == [2, 2, 8, 8, 32, 32]
    state = rule.init()
    for trial, score in enumerate([0.6, 0.5, 0.4, 0.3]):
        state, decision = rule.report(state, str(trial), 12, score)
        assert decision is Decision.CONTINUE
    # 0.4 bounds the best third of the four; 0.375 would bound the best quarter.
    assert rule.report(state, "new", 12, 0.41)[1] is Decision.STOP
    assert rule.report(state, "new", 12, 0.40)[1] is Decision.CONTINUE


def test_the_last_score_of_a_trial_goes_to_a_rung_at_max_t_where_the_spacing_meets_it() -> None:
    meets = RASDA(max_t=16, grace_period=1, reduction_factor=3, scaling_factor=4)
    assert set(meets.complete(meets.init(), "a", 16, 0.5).rungs) == {16}
    passes = RASDA(max_t=9, grace_period=1, reduction_factor=3, scaling_factor=4)
    assert set(passes.complete(passes.init(), "a", 9, 0.5).rungs) == {4}


def test_cap() -> None:
    rule = RASDA(max_t=40, grace_period=5, workers=2, max_workers=6)
    assert [rule.workers_at(t) for t in (0, 5, 10, 20)] == [2, 4, 6, 6]


def test_halves_as_asha_and_doubles_survivors() -> None:
    rule = RASDA(max_t=8, workers=3, mode="max")
    halving = AsyncSuccessiveHalving(max_t=8, reduction_factor=2, mode="max")
    state, plain = rule.init(), halving.init()
    for trial, t, score in [("a", 1, 0.9), ("b", 1, 0.1), ("a", 3, 0.9), ("c", 2, 1.0), ("a", 8, 0.9)]:
        state, decision = rule.report(state, trial, t, score)
        plain, of_asha = halving.report(plain, trial, t, score)
        assert decision is of_asha
        assert state == plain
    assert decision is Decision.STOP
    assert rule.report(rule.init(), "a", 3, 0.5)[1] is Decision.CONTINUE
    assert rule.workers_at(3) == 12  # 1 and 2 are behind it: 3 * 2 * 2


def test_those_that_waited_are_decided_at_once_and_get_what_they_are_due() -> None:
    rule = RASDA(max_t=8, workers=3, wait=0.1)
    state, decision = rule.report(rule.init(), "a", 2, 0.5)
    assert decision is Decision.WAIT
    assert rule.workers_at(2) == 12
    halving = AsyncSuccessiveHalving(max_t=8, reduction_factor=2, wait=0.1)
    scores = {"a": 0.5, "b": 0.4}
    assert rule.decide(state, 2, scores) == halving.decide(halving.init(), 2, scores)
    assert rule.decide(state, 2, scores)[1] == {"b": Decision.CONTINUE, "a": Decision.STOP}


def test_unless_told_otherwise_it_is_the_papers() -> None:
    assert RASDA(8) == RASDA(8, wait=0, grow="due")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scaling_factor": 1}, "`scaling_factor` is 1, but must be an integer >= 2"),
        ({"reduction_factor": 1}, "`reduction_factor` is 1, but must be an integer >= 2"),
        ({"workers": 0}, "`workers` is 0, but must be an integer >= 1"),
        ({"workers": 4, "max_workers": 2}, "`max_workers` is 2, but must be None or an integer >= 4"),
        ({"grace_period": 41}, r"`grace_period` is 41, but must be <= `max_t` \(40\)"),
        ({"mode": "up"}, "`mode` is 'up'"),
        ({"wait": -0.1}, "`wait` is -0.1, but must be a number >= 0"),
        ({"grow": "fast"}, r"`grow` is 'fast', but must be one of \('due', 'efficient'\)"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RASDA(max_t=40, **arguments)
