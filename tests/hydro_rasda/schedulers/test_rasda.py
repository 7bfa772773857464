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
    rule = RASDA(max_t=27, reduction_factor=3, scaling_factor=4)
    assert [rule.workers_at(t) for t in (0, 1, 3, 9)] == [1, 4, 16, 64]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scaling_factor": 1}, "`scaling_factor` is 1, but must be >= 2"),
        ({"reduction_factor": 1}, "`reduction_factor` is 1, but must be >= 2"),
        ({"workers": 0}, "`workers` is 0, but must be >= 1"),
        ({"workers": 4, "max_workers": 2}, "`max_workers` is 2, but must be >= 4"),
        ({"grace_period": 41}, r"`grace_period` is 41, but must be <= `max_t` \(40\)"),
        ({"mode": "up"}, "`mode` is 'up'"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RASDA(max_t=40, **arguments)
