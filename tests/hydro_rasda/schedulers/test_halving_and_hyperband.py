"""Hyperband against Ray Tune's brackets."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from ray.tune.schedulers.hyperband import HyperBandScheduler, _Bracket

from hydro_rasda.schedulers import (
    Bracket,
    Continue,
    Hyperband,
    Mode,
    Stop,
    SuccessiveHalving,
    SweepState,
    milestones,
)
from hydro_rasda.schedulers.sweep_rule import carry_out
from tests.hydro_rasda.schedulers.played import Curves, play


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


@pytest.mark.parametrize("rule", [Bracket, Hyperband])
def test_a_rule_needs_its_halving(rule: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match="`halving` is 3, but must be of the class SuccessiveHalving"):
        rule(3)


def test_before_a_rung_is_complete_one_in_rf_goes_on_however_many_are_to_be_kept() -> None:
    halving = SuccessiveHalving((1, 3, 9), 3, "min", keep_at_least=4)
    scores = {n: float(n) for n in range(7)}
    assert halving.promote(scores, complete=False) == (0, 1)
    assert halving.promote(scores) == (0, 1, 2, 3)
    assert halving.promote({0: 1.0, 1: 2.0}, complete=False) == ()


def bracket(keep: int = 1, rf: int = 3, max_t: int = 27) -> Bracket:
    return Bracket(SuccessiveHalving(milestones(1, max_t, rf), rf, "min", keep_at_least=keep))


def swept(trials: int, keep: int = 1, max_t: int = 27) -> SweepState:
    """A sweep whose trials have all been admitted, and wait for their first milestone."""
    sweep = SweepState("min", max_t, keep)
    for number in range(trials):
        sweep.admit(number, {})
    return sweep


def come(sweep: SweepState, scores: Mapping[int, float]) -> None:
    for number, score in scores.items():
        goal = sweep.trials[number].goal
        assert goal is not None
        sweep.come(number, {goal: score})


def climb(rule: Bracket, sweep: SweepState, devices: int, width: int, seed: int) -> int:
    """Train groups on devices that are done in random order, until the sweep is over. A trial's score is its number.

    Returns the epochs that were trained.
    """
    rng = random.Random(seed)
    under_way: list[list[int]] = []
    trained = 0
    while True:
        begun = {number for group in under_way for number in group}
        moves = rule.decide(sweep)
        left = [number for number in sweep.training if number not in begun]
        if not moves and not left and len(under_way) < devices:
            sweep.idle = True
            moves = rule.decide(sweep)
            sweep.idle = False
        if moves:
            carry_out(moves, sweep)
        elif left and len(under_way) < devices:
            stop = min(sweep.training[number].goal or 0 for number in left)
            group = [number for number in left if sweep.training[number].goal == stop][:width]
            trained += sum(stop - sweep.training[number].epoch for number in group)
            under_way.append(group)
        elif under_way:
            come(sweep, {number: float(number) for number in under_way.pop(rng.randrange(len(under_way)))})
        else:
            return trained


@pytest.mark.parametrize(("trials", "keep", "expected"), [(27, 1, 27 + 18 + 18), (27, 4, 27 + 18), (3, 4, 3)])
def test_one_device_trains_what_synchronous_halving_trains(trials: int, keep: int, expected: int) -> None:
    rule, sweep = bracket(keep, max_t=9), swept(trials, keep, max_t=9)
    assert rule.epochs(sweep) == expected
    assert climb(rule, sweep, devices=1, width=5, seed=0) == expected
    assert list(rule.finalists(sweep)) == list(range(min(trials, keep)))


@pytest.mark.parametrize("seed", range(20))
def test_many_devices_find_the_best_and_train_little_more(seed: int) -> None:
    rule, sweep = bracket(keep=3), swept(81, keep=3)
    trained = climb(rule, sweep, devices=4, width=6, seed=seed)
    assert list(rule.finalists(sweep)) == [0, 1, 2]
    # Each rung may promote early as many as it promotes in the end.
    assert rule.epochs(sweep) <= trained <= 2 * rule.epochs(sweep)


def first_rung(rule: Bracket, sweep: SweepState) -> None:
    moves = rule.decide(sweep)
    assert moves == {number: Continue(1) for number in sweep.trials}
    carry_out(moves, sweep)


def test_a_free_device_goes_on_with_the_best_while_others_train() -> None:
    rule, sweep = bracket(), swept(9)
    first_rung(rule, sweep)
    come(sweep, {n: float(n) for n in range(3, 9)})  # trials 0, 1, 2 are still under way
    assert rule.decide(sweep) == {}
    sweep.idle = True
    assert rule.decide(sweep) == {3: Continue(3), 4: Continue(3)}
    carry_out(rule.decide(sweep), sweep)
    assert rule.decide(sweep) == {}
    sweep.idle = False
    come(sweep, {0: 0.0, 1: 1.0, 2: 2.0})
    assert rule.decide(sweep) == {0: Continue(3), 1: Continue(3), 2: Continue(3)} | {n: Stop() for n in range(5, 9)}


def test_nobody_goes_on_early_where_the_next_decision_is_the_last() -> None:
    rule, sweep = bracket(keep=3), swept(9, keep=3)
    first_rung(rule, sweep)
    come(sweep, {n: float(n) for n in range(6)})
    sweep.idle = True
    assert rule.decide(sweep) == {}


def test_new_trials_come_in_once_the_first_rung_is_through() -> None:
    rule, sweep = bracket(), swept(6)
    sweep.left = 6
    first_rung(rule, sweep)
    assert rule.admit(sweep) == 0
    come(sweep, {n: float(n) for n in range(6)})
    assert rule.decide(sweep) == {}  # more could come, among which these are not the best
    assert rule.admit(sweep) == 6
    for number in range(6, 12):
        sweep.admit(number, {})
    assert rule.decide(sweep) == {n: Continue(1) for n in range(6, 12)}


def test_the_best_so_far_came_furthest_and_did_not_diverge() -> None:
    rule, sweep = bracket(), swept(9)
    first_rung(rule, sweep)
    come(sweep, {n: float(n) for n in range(9)})
    carry_out(rule.decide(sweep), sweep)
    come(sweep, {0: math.nan, 1: 5.0, 2: 4.0})
    assert sweep.best(4) == [2, 1, 3, 4]


STOPS = milestones(1, 27, 3)


def rule(mode: Mode = "min") -> Hyperband:
    return Hyperband(SuccessiveHalving(STOPS, 3, mode))


def curves(count: int, seed: int) -> list[list[float]]:
    drawn: list[list[float]] = np.random.default_rng(seed).normal(size=(count, 27)).tolist()
    return drawn


@pytest.mark.parametrize("max_t", [9, 27, 81])
def test_brackets_are_as_large_as_ray_tunes(max_t: int) -> None:
    found = Hyperband(SuccessiveHalving(milestones(1, max_t, 3), 3, "min"))
    ray = HyperBandScheduler(max_t=max_t, reduction_factor=3)
    assert found.sizes == tuple(ray._get_n0(s) for s in range(len(found.sizes)))


def test_many_rungs_are_distributed_in_time_that_grows_with_their_trials() -> None:
    """A count of the trials so far for each trial would take minutes."""
    of = Hyperband(SuccessiveHalving(milestones(1, 3**9, 3), 3, "min"))
    assert Counter(map(of.bracket_of, range(sum(of.sizes)))) == dict(enumerate(of.sizes))


class RayTrial:
    """All that Ray Tune's bracket asks of a trial."""

    def __init__(self, number: int) -> None:
        self.number = number


def by_ray(stops: tuple[int, ...], numbers: list[int], scores: Curves, mode: Mode) -> dict[int, int]:
    """By trial, the epoch at which Ray Tune's bracket ends it."""
    bracket = _Bracket("t", len(numbers), stops[0], stops[-1], 3, len(stops) - 1)
    for number in numbers:
        bracket.add_trial(RayTrial(number))
    ended = {}
    for stop in stops:
        for trial in bracket.current_trials():
            ended[trial.number] = stop
            bracket.update_trial_stats(trial, {"t": stop, "score": scores[trial.number][stop - 1]})
        if stop < stops[-1]:
            _, bad = bracket.successive_halving("score", -1.0 if mode == "min" else 1.0)
            for trial in bad:
                bracket.cleanup_trial(trial)
    return ended


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("s", range(len(STOPS)))
def test_each_bracket_decides_as_ray_tunes(mode: Mode, s: int) -> None:
    """With as many trials as each halving divides evenly: Ray Tune rounds up what goes on, the paper rounds down."""
    of = rule(mode)
    numbers = [number for number in range(1000) if of.bracket_of(number) == s][: 2 * 3**s]
    for seed in range(5):
        scores = curves(numbers[-1] + 1, seed)
        sweep = play(of, scores, mode)
        assert {number: sweep.trials[number].epoch for number in numbers} == by_ray(
            STOPS[-s - 1 :], numbers, scores, mode
        )


@pytest.mark.parametrize("count", [1, 2, 17, 60])
def test_each_bracket_has_its_share_and_one_that_reaches_the_end(count: int) -> None:
    of = rule()
    sweep = play(of, curves(count, 0))
    held = [[n for n in range(count) if of.bracket_of(n) == s] for s in range(len(STOPS))]
    for s, numbers in enumerate(held):
        assert abs(len(numbers) - count * of.sizes[s] / sum(of.sizes)) <= 1
        if numbers:
            assert max(sweep.trials[n].epoch for n in numbers) == 27
    at_the_end = [n for n, trial in sweep.trials.items() if trial.epoch == 27]
    assert of.finalists(sweep) == sorted(at_the_end, key=lambda n: sweep.trials[n].score)[:2]
    expected = sum(trial.epoch for trial in sweep.trials.values())
    assert of.epochs(sweep) == expected


def test_trials_that_come_later_change_no_bracket() -> None:
    assert [rule().bracket_of(n) for n in range(40)] == [rule().bracket_of(n) for n in range(400)][:40]


def test_with_several_devices_nobody_waits_and_each_bracket_ends() -> None:
    of, scores = rule(), curves(80, 1)
    for seed in range(5):
        sweep = play(of, scores, at_once=3, seed=seed)
        assert not sweep.training
        for s in range(len(STOPS)):
            epochs = [trial.epoch for n, trial in sweep.trials.items() if of.bracket_of(n) == s]
            assert min(epochs) == STOPS[-s - 1]
            assert max(epochs) == 27
