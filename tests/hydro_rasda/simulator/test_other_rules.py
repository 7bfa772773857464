"""Rules beyond RASDA's, in the simulator's shape."""

import pytest

from hydro_rasda.schedulers import RASDA, Decision, Growth
from tests.hydro_rasda.simulator.other_rules import FillCluster, VaryingFactors, WhilePaying


def growth(
    held: int = 2, due: int = 4, alive: int = 8, capacity: int = 64, seconds: dict[int, float] | None = None
) -> Growth:
    return Growth(held, due, 2, alive, capacity, seconds or {})


def test_grows_while_the_last_growth_paid() -> None:
    """From 2 to 4 at half the time: efficiency 1. From 4 to 8 at 0.8 of the time: 0.625."""
    measured = {2: 10.0, 4: 5.0, 8: 4.0}
    assert WhilePaying(0.7)(growth(due=4, seconds={2: 10.0})) == 4
    assert WhilePaying(0.7)(growth(held=4, due=8, seconds={2: 10.0, 4: 5.0})) == 8
    assert WhilePaying(0.7)(growth(held=4, due=8, seconds=measured)) == 4
    assert WhilePaying(0.6)(growth(held=4, due=8, seconds=measured)) == 8
    assert WhilePaying(0.7)(growth(held=8, due=16, seconds=measured)) == 8


def test_a_probe_spares_the_first_try_and_a_measurement_overrules_it() -> None:
    rule = WhilePaying(0.7, probed={2: 10.0, 4: 9.0})
    assert rule(growth(due=4)) == 2
    assert rule(growth(due=4, seconds={4: 5.0})) == 4


def test_fills_the_cluster_with_who_is_left() -> None:
    """64 workers for 8 trials: 8 each; for 5: 8 each, since 16 each would be 80."""
    assert FillCluster()(growth(alive=8)) == 8
    assert FillCluster()(growth(alive=5)) == 8
    assert FillCluster()(growth(alive=4)) == 16
    assert FillCluster()(growth(alive=1)) == 64
    assert FillCluster()(growth(held=32, alive=4)) == 32
    assert FillCluster(surviving=0.5)(growth(alive=8)) == 16


def test_varying_factors_that_do_not_vary_are_rasda() -> None:
    rule = VaryingFactors((5, 10, 20, 40), (2, 2, 2), (2, 2, 2), workers=2)
    same = RASDA(max_t=40, grace_period=5, workers=2)
    mine, theirs = rule.init(), same.init()
    for t in (5, 10, 20):
        for trial, score in (("a", 0.5), ("b", 0.7), ("c", 0.3), ("d", 0.4)):
            mine, ours = rule.report(mine, trial, t, score)
            theirs, other = same.report(theirs, trial, t, score)
            assert ours == other
    assert rule.report(mine, "a", 40, 0.1)[1] is Decision.STOP


def test_a_rung_stops_by_its_own_factor() -> None:
    """With rf 4, a score goes on that is among the best quarter of those before it, or that is the first."""
    rule = VaryingFactors((1, 2, 4), (4, 2), (2, 2))
    state, kept = rule.init(), []
    for trial in range(9):
        state, decision = rule.report(state, str(trial), 1, score=[4, 2, 6, 1, 5, 3, 0, 8, 7][trial])
        kept += [trial] if decision is Decision.CONTINUE else []
    assert kept == [0, 1, 3, 6]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`threshold` is 0.0, but must be a number > 0"):
        WhilePaying(0.0)
    with pytest.raises(ValueError, match=r"`step` is 1, but must be an integer >= 2"):
        FillCluster(1)
    with pytest.raises(ValueError, match=r"`reduction_factors` is \(2,\), but must be 2 factors"):
        VaryingFactors((1, 2, 4), (2,), (2, 2))
    with pytest.raises(ValueError, match=r"`scaling_factors` is 0, but must be an integer >= 1"):
        VaryingFactors((1, 2, 4), (2, 2), (2, 0))
    with pytest.raises(ValueError, match=r"`milestones` is \(2, 1, 4\), but must be strictly increasing"):
        VaryingFactors((2, 1, 4), (2, 2), (2, 2))
    with pytest.raises(ValueError, match=r"`milestones` is \(\), but must be one epoch or more"):
        VaryingFactors((), (), ())
    with pytest.raises(ValueError, match=r"`workers` is 0, but must be an integer >= 1"):
        VaryingFactors((1, 4), (2,), (2,), workers=0)
