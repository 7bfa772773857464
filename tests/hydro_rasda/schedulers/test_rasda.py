import pytest

from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving, Decision


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
        state, verdict = rule.report(state, str(trial), 12, score)
        assert verdict == (Decision.CONTINUE, 32)
    # 0.4 bounds the best third of the four; 0.375 would bound the best quarter.
    assert rule.report(state, "new", 12, 0.41)[1].decision is Decision.STOP
    assert rule.report(state, "new", 12, 0.40)[1].decision is Decision.CONTINUE


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
        state, verdict = rule.report(state, trial, t, score)
        plain, decision = halving.report(plain, trial, t, score)
        assert verdict.decision is decision
        assert state == plain
    assert verdict.decision is Decision.STOP
    assert rule.report(rule.init(), "a", 3, 0.5)[1] == (
        Decision.CONTINUE,
        12,
    )  # 1 and 2 are behind it: 3 * 2 * 2


def test_those_that_waited_are_decided_at_once_and_get_what_they_are_due() -> None:
    rule = RASDA(max_t=8, workers=3, wait=0.1)
    state, verdict = rule.report(rule.init(), "a", 2, 0.5)
    assert verdict == (Decision.WAIT, 12)
    state, verdicts = rule.decide(state, 2, {"a": 0.5, "b": 0.4})
    assert verdicts == {"b": (Decision.CONTINUE, 12), "a": (Decision.STOP, 12)}
    assert state == rule.halving.decide(rule.init(), 2, {"a": 0.5, "b": 0.4})[0]


def test_unless_told_otherwise_it_is_the_papers() -> None:
    assert RASDA(8) == RASDA(8, wait=0, grow="due")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scaling_factor": 1}, "`scaling_factor` is 1, but must be an integer >= 2"),
        ({"reduction_factor": 1}, "`reduction_factor` is 1, but must be an integer >= 2"),
        ({"workers": 0}, "`workers` is 0, but must be an integer >= 1"),
        ({"workers": 4, "max_workers": 2}, "`max_workers` is 2, but must be an integer >= 4"),
        ({"grace_period": 41}, r"`grace_period` is 41, but must be <= `max_t` \(40\)"),
        ({"mode": "up"}, "`mode` is 'up'"),
        ({"wait": -0.1}, "`wait` is -0.1, but must be a number >= 0"),
        ({"grow": "fast"}, r"`grow` is 'fast', but must be one of \('due', 'efficient'\)"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RASDA(max_t=40, **arguments)
