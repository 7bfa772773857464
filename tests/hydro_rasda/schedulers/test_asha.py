import math
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hydro_rasda.schedulers import AsyncSuccessiveHalving, Decision, Mode

Report = tuple[str, int, float]


def stream(seed: int, trials: int, max_t: int, stride: int) -> list[Report]:
    """Reports of trials that run side by side at different speeds, every `stride` iterations."""
    rng = random.Random(seed)
    clock = {f"t{i:02d}": 0 for i in range(trials)}
    reports = []
    while clock:
        trial = rng.choice(sorted(clock))
        clock[trial] += stride
        score = rng.choice([0.1, 0.2, 0.3]) if rng.random() < 0.3 else rng.random()
        reports.append((trial, clock[trial], score))
        if clock[trial] >= max_t + stride:
            del clock[trial]
    return reports


def ours(scheduler: AsyncSuccessiveHalving, reports: list[Report], ends: dict[str, int]) -> list[tuple[str, int, str]]:
    state, decisions, over = scheduler.init(), [], set()
    for trial, t, score in reports:
        if trial in over:
            continue
        if t >= ends.get(trial, 10**9):
            state, decision = scheduler.complete(state, trial, t, score), Decision.STOP
        else:
            state, decision = scheduler.report(state, trial, t, score)
            if decision is Decision.STOP:
                state = scheduler.complete(state, trial, t, score)
        if decision is Decision.STOP:
            over.add(trial)
        decisions.append((trial, t, decision.value.upper()))
    return decisions


def rays(scheduler: AsyncSuccessiveHalving, reports: list[Report], ends: dict[str, int]) -> list[tuple[str, int, str]]:
    """The same stream through Ray's scheduler, in the order of calls that Ray's controller makes."""
    from ray.tune.schedulers import ASHAScheduler

    ray = ASHAScheduler(
        metric="score",
        mode=scheduler.mode,
        max_t=scheduler.max_t,
        grace_period=scheduler.grace_period,
        reduction_factor=scheduler.reduction_factor,
    )
    trials: dict[str, SimpleNamespace] = {}
    decisions, over = [], set()
    for trial, t, score in reports:
        if trial in over:
            continue
        if trial not in trials:
            trials[trial] = SimpleNamespace(trial_id=trial)
            ray.on_trial_add(None, trials[trial])
        result = {"training_iteration": t, "score": score}
        done = t >= ends.get(trial, 10**9)
        action = "STOP" if done else ray.on_trial_result(None, trials[trial], result)
        if action == "STOP":
            ray.on_trial_complete(None, trials[trial], result)
            over.add(trial)
        decisions.append((trial, t, action))
    return decisions


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("max_t", "grace", "rf"), [(40, 5, 2), (27, 1, 3), (30, 5, 2), (10, 3, 4), (1, 1, 2)])
@pytest.mark.parametrize("stride", [1, 3, 7])
def test_decides_as_ray_does(mode: Mode, max_t: int, grace: int, rf: int, stride: int) -> None:
    scheduler = AsyncSuccessiveHalving(max_t, grace, rf, mode=mode)
    for seed in range(4):
        reports = stream(seed, trials=24, max_t=max_t, stride=stride)
        ends = {"t03": 4, "t07": 11, "t11": 1}
        assert ours(scheduler, reports, ends) == rays(scheduler, reports, ends)


def test_textbook_cutoff() -> None:
    scheduler = AsyncSuccessiveHalving(max_t=9, reduction_factor=3, mode="max")
    state, decision = scheduler.init(), Decision.STOP
    for trial, score, expected in [
        ("a", 0.0, Decision.CONTINUE),  # nobody to be measured by
        ("b", 3.0, Decision.CONTINUE),
        ("c", 1.9, Decision.STOP),  # 2/3 between 0 and 3 is 2
        ("d", 2.3, Decision.CONTINUE),  # 2/3 of the way through 0, 1.9, 3: 1.9 + (3 - 1.9) / 3 = 2.266...
    ]:
        state, decision = scheduler.report(state, trial, 1, score)
        assert decision is expected


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("rf", [2, 3, 4, 7])
def test_the_cutoff_is_numpys_to_the_last_bit(mode: Mode, rf: int) -> None:
    scheduler, sign = AsyncSuccessiveHalving(9, 1, rf, mode=mode), 1.0 if mode == "max" else -1.0
    rng = random.Random(rf)
    state, gains = scheduler.init(), []
    for i in range(200):
        gains.append(rng.choice([0.1, rng.random(), rng.gauss(0, 1e9)]))
        state = state.recorded(1, f"t{i}", sign * gains[-1])
        cutoff = float(np.percentile(gains, (1 - 1 / rf) * 100))
        assert scheduler.report(state, "new", 1, sign * cutoff)[1] is Decision.CONTINUE
        assert scheduler.report(state, "new", 1, sign * math.nextafter(cutoff, -math.inf))[1] is Decision.STOP


def test_states_that_branch_off_one_another_do_not_meet() -> None:
    scheduler = AsyncSuccessiveHalving(max_t=9, reduction_factor=2, mode="max")
    trunk = scheduler.init()
    for i in range(5):
        trunk, _ = scheduler.report(trunk, f"t{i}", 1, float(i))
    high, low = trunk, trunk
    for i in range(5, 10):
        high, _ = scheduler.report(high, f"t{i}", 1, 10.0)
        low, _ = scheduler.report(low, f"t{i}", 1, -10.0)
    assert dict(trunk.rungs[1]) == {f"t{i}": float(i) for i in range(5)}
    assert dict(high.rungs[1]) == {f"t{i}": float(i) if i < 5 else 10.0 for i in range(10)}
    assert dict(low.rungs[1]) == {f"t{i}": float(i) if i < 5 else -10.0 for i in range(10)}
    decisions = [scheduler.report(state, "new", 1, 2.0)[1] for state in (trunk, high, low)]
    assert decisions == [Decision.CONTINUE, Decision.STOP, Decision.CONTINUE]


def test_a_trials_later_score_takes_the_place_of_its_first() -> None:
    state = AsyncSuccessiveHalving(max_t=9).init().recorded(1, "a", 0.5).recorded(1, "b", 0.1)
    again = state.recorded(1, "a", math.nan)
    assert list(again.rungs[1].items()) == [("a", None), ("b", 0.1)]
    assert list(again.rungs[1].finite()) == [0.1]
    assert list(state.rungs[1].items()) == [("a", 0.5), ("b", 0.1)]


def test_a_report_costs_the_same_however_many_came_before() -> None:
    """With a copy of the rung at each report, 40,000 of them took over a minute."""
    scheduler = AsyncSuccessiveHalving(max_t=9, reduction_factor=2)
    state, rng = scheduler.init(), random.Random(0)
    began = time.process_time()
    for i in range(40_000):
        state, _ = scheduler.report(state, str(i), 1, rng.random())
    assert time.process_time() - began < 20
    assert len(state.rungs[1]) == 40_000


def test_reached_or_passed() -> None:
    scheduler = AsyncSuccessiveHalving(max_t=8, reduction_factor=2, mode="min")
    state, _ = scheduler.report(scheduler.init(), "a", 3, 0.5)
    assert set(state.rungs) == {2}
    state, _ = scheduler.report(state, "a", 6, 0.5)
    assert set(state.rungs) == {2, 4}


def test_stops_at_max_t() -> None:
    scheduler = AsyncSuccessiveHalving(max_t=8, reduction_factor=2)
    assert scheduler.report(scheduler.init(), "a", 8, 0.0)[1] is Decision.STOP
    assert scheduler.report(scheduler.init(), "a", 11, 0.0)[1] is Decision.STOP


def test_what_diverged_stops_and_leaves_the_cutoff_alone() -> None:
    scheduler = AsyncSuccessiveHalving(max_t=9, reduction_factor=3, mode="max")
    state = scheduler.init()
    for trial, score in [("a", math.nan), ("b", math.inf), ("c", -math.inf)]:
        state, decision = scheduler.report(state, trial, 1, score)
        assert decision is Decision.STOP
    state, decision = scheduler.report(state, "d", 1, -5.0)
    assert decision is Decision.CONTINUE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_t": 0}, "`max_t` is 0, but must be an integer >= 1"),
        ({"max_t": 4, "grace_period": 5}, r"`grace_period` is 5, but must be <= `max_t` \(4\)"),
        ({"max_t": 4, "grace_period": 0}, "`grace_period` is 0, but must be an integer >= 1"),
        ({"max_t": 4, "reduction_factor": 1}, "`reduction_factor` is 1, but must be an integer >= 2"),
        ({"max_t": 4, "mode": "up"}, "`mode` is 'up'"),
    ],
)
def test_bad_input(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncSuccessiveHalving(**arguments)


def test_who_stands_at_a_milestone_is_measured_by_all_that_came_there() -> None:
    """Two that were cut off before they were decided: the first to come is not let through for being the first."""
    scheduler = AsyncSuccessiveHalving(max_t=8, reduction_factor=2)
    state = scheduler.init()
    for trial, score in (("a", 0.9), ("b", 0.5), ("c", 0.7), ("d", math.nan)):
        state = scheduler.complete(state, trial, 2, score)
    short = [trial for trial in "abcde" if scheduler.falls_short(state, trial, 2)]
    assert short == ["a", "d"]
    assert not scheduler.falls_short(state, "a", 3)
    assert not scheduler.falls_short(scheduler.complete(state, "a", 8, 0.9), "a", 8)


@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("trials", [1, 2, 3, 7, 8, 9, 64])
def test_of_those_decided_together_the_best_go_on_one_in_so_many_rounded_up(trials: int, factor: int) -> None:
    rule = AsyncSuccessiveHalving(9, 1, factor, wait=0.1)
    scores = {f"t{i}": (i * 37 % 64) / 64 for i in range(trials)}
    state, decisions = rule.decide(rule.init(), 1, scores)
    assert list(decisions) == sorted(scores, key=scores.__getitem__)
    assert [*decisions.values()].count(Decision.CONTINUE) == -(-trials // factor)
    assert [*decisions.values()] == sorted(decisions.values())  # "continue" before "stop"
    assert dict(state.rung(1)) == scores


@pytest.mark.parametrize("mode", ["min", "max"])
def test_equal_scores_that_are_decided_together_share_their_fate(mode: Mode) -> None:
    rule = AsyncSuccessiveHalving(9, 1, 2, mode=mode, wait=0.1)
    best, worst = (0.1, 0.9) if mode == "min" else (0.9, 0.1)
    _, decisions = rule.decide(rule.init(), 1, {"a": 0.5, "b": best, "c": 0.5, "d": worst})
    assert decisions == dict(zip("bacd", [*[Decision.CONTINUE] * 3, Decision.STOP]))
    _, decisions = rule.decide(rule.init(), 1, {"a": 0.5, "b": best, "c": 0.5, "d": best})
    assert decisions == dict(zip("bdac", [*[Decision.CONTINUE] * 2, *[Decision.STOP] * 2]))


def test_those_decided_together_are_compared_with_those_before_them_too() -> None:
    rule = AsyncSuccessiveHalving(9, 1, 2, wait=0.1)
    before, _ = rule.decide(rule.init(), 1, {"a": 0.1, "b": 0.2, "c": 0.3})
    state, decisions = rule.decide(before, 1, {"d": 0.15, "e": 0.21})
    assert decisions == {"d": Decision.CONTINUE, "e": Decision.STOP}
    assert (list(state.rung(1)), list(before.rung(1))) == (["a", "b", "c", "d", "e"], ["a", "b", "c"])


def test_a_trial_that_is_to_wait_is_not_counted_yet_and_a_diverged_one_need_not() -> None:
    rule = AsyncSuccessiveHalving(4, 1, 2, wait=0.1)
    start = rule.init()
    assert rule.report(start, "a", 1, 0.5) == (start, Decision.WAIT)
    state, decision = rule.report(start, "b", 1, math.nan)
    assert (decision, list(state.rung(1))) == (Decision.STOP, ["b"])
    assert rule.report(start, "a", 4, 0.5)[1] is Decision.STOP
    state, _ = rule.decide(start, 1, {"a": 0.5})
    assert rule.report(state, "a", 1, 0.5) == (state, Decision.CONTINUE)


@pytest.mark.parametrize("wait", [-1, math.nan, None])
def test_a_wait_that_is_none(wait: float) -> None:
    with pytest.raises(ValueError, match=r"`wait` is .*, but must be a number >= 0"):
        AsyncSuccessiveHalving(9, wait=wait)
