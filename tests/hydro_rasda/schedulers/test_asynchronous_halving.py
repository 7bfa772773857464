from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest

from hydro_rasda.schedulers import Bracket, Continue, Move, Stop, SuccessiveHalving, SweepState, milestones


def bracket(keep: int = 1, rf: int = 3, max_t: int = 27) -> Bracket:
    return Bracket(SuccessiveHalving(milestones(1, max_t, rf), rf, "min", keep_at_least=keep))


def swept(trials: int, keep: int = 1, max_t: int = 27) -> SweepState:
    """A sweep whose trials have all been admitted, and wait for their first milestone."""
    sweep = SweepState("min", max_t, keep)
    for number in range(trials):
        sweep.admit(number, {})
    return sweep


def carry_out(moves: Mapping[int, Move], sweep: SweepState) -> None:
    for number, move in moves.items():
        if isinstance(move, Continue):
            sweep.go_on(number, move.to)
        else:
            sweep.drop(number)


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
