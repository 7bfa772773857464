"""The schedulers in the simulator's shape."""

from functools import partial

import pytest

from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving, Decision
from hydro_rasda.simulator import FixedWorkers, Plan, VaryingFactors


def test_fixed_workers_decide_as_asha() -> None:
    halving = AsyncSuccessiveHalving(max_t=9, reduction_factor=3)
    rule = FixedWorkers(halving, workers=4)
    state, plain = rule.init(), halving.init()
    for trial, t, score in (("a", 1, 0.5), ("b", 1, 0.9), ("c", 1, 0.1), ("c", 3, 0.2), ("c", 9, 0.2)):
        state, verdict = rule.report(state, trial, t, score)
        plain, decision = halving.report(plain, trial, t, score)
        assert verdict == (decision, 4)
    assert rule.complete(state, "c", 9, 0.2) == halving.complete(plain, "c", 9, 0.2)


def test_varying_factors_that_do_not_vary_are_rasda() -> None:
    rule = VaryingFactors((5, 10, 20, 40), (2, 2, 2), (2, 2, 2), workers=2)
    same = RASDA(max_t=40, grace_period=5, workers=2)
    mine, theirs = rule.init(), same.init()
    for t in (5, 10, 20):
        for trial, score in (("a", 0.5), ("b", 0.7), ("c", 0.3), ("d", 0.4)):
            mine, ours = rule.report(mine, trial, t, score)
            theirs, other = same.report(theirs, trial, t, score)
            assert ours == other
    assert rule.report(mine, "a", 40, 0.1)[1].decision is Decision.STOP


def test_a_rung_stops_by_its_own_factor() -> None:
    """With rf 4, a score goes on that is among the best quarter of those before it, or that is the first."""
    rule = VaryingFactors((1, 2, 4), (4, 2), (2, 2))
    state, kept = rule.init(), []
    for trial in range(9):
        state, verdict = rule.report(state, str(trial), 1, score=[4, 2, 6, 1, 5, 3, 0, 8, 7][trial])
        kept += [trial] if verdict.decision is Decision.CONTINUE else []
    assert kept == [0, 1, 3, 6]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`reduction_factors` is \(2,\), but must be 2 factors"):
        VaryingFactors((1, 2, 4), (2,), (2, 2))
    with pytest.raises(ValueError, match=r"`scaling_factors` is 0, but must be an integer >= 1"):
        VaryingFactors((1, 2, 4), (2, 2), (2, 0))
    with pytest.raises(ValueError, match=r"`milestones` is \(2, 1, 4\), but must be strictly increasing"):
        VaryingFactors((2, 1, 4), (2, 2), (2, 2))
    with pytest.raises(ValueError, match=r"`milestones` is \(\), but must be one epoch or more"):
        VaryingFactors((), (), ())
    for rule in (partial(FixedWorkers, AsyncSuccessiveHalving(4)), partial(VaryingFactors, (1, 4), (2,), (2,))):
        with pytest.raises(ValueError, match=r"`workers` is 0, but must be an integer >= 1"):
            rule(workers=0)


def test_a_rule_that_breaks_its_contract() -> None:
    class Odd(FixedWorkers):
        milestones = (1, 9, 3)
        wait = -1.0

    class Unordered(Odd):
        wait = 0.0

    for rule, message in (
        (Odd, "`rule.wait` is -1.0, but must be a number >= 0"),
        (
            Unordered,
            r"`rule.milestones` is \(1, 9, 3\), but must be strictly increasing epochs",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Plan(rule(AsyncSuccessiveHalving(9)))
    with pytest.raises(ValueError, match="`patience` is 0, but must be an integer >= 1"):
        Plan(FixedWorkers(AsyncSuccessiveHalving(9)), patience=0)
