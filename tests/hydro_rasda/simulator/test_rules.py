"""The schedulers in the simulator's shape."""

import pytest

from hydro_rasda.schedulers import AsyncSuccessiveHalving
from hydro_rasda.simulator import FixedWorkers, Plan


def test_fixed_workers_decide_as_asha() -> None:
    halving = AsyncSuccessiveHalving(max_t=9, reduction_factor=3)
    rule = FixedWorkers(halving, workers=4)
    state, plain = rule.init(), halving.init()
    for trial, t, score in (("a", 1, 0.5), ("b", 1, 0.9), ("c", 1, 0.1), ("c", 3, 0.2), ("c", 9, 0.2)):
        state, decision = rule.report(state, trial, t, score)
        plain, of_asha = halving.report(plain, trial, t, score)
        assert decision is of_asha
        assert rule.workers_at(t) == 4
    assert rule.complete(state, "c", 9, 0.2) == halving.complete(plain, "c", 9, 0.2)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`workers` is 0, but must be an integer >= 1"):
        FixedWorkers(AsyncSuccessiveHalving(4), workers=0)


def test_a_rule_that_breaks_its_contract() -> None:
    for name, value, message in (
        ("wait", -1.0, "`rule.wait` is -1.0, but must be a number >= 0"),
        ("milestones", (1, 9, 3), r"`rule.milestones` is \(1, 9, 3\), but must be strictly increasing epochs"),
    ):
        rule = FixedWorkers(AsyncSuccessiveHalving(9))
        object.__setattr__(rule, name, value)
        with pytest.raises(ValueError, match=message):
            Plan(rule)
    with pytest.raises(ValueError, match="`patience` is 0, but must be an integer >= 1"):
        Plan(FixedWorkers(AsyncSuccessiveHalving(9)), patience=0)
