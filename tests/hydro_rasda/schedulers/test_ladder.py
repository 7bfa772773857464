from __future__ import annotations

import math
import random

import pytest

from hydro_rasda.schedulers import Ladder, SuccessiveHalving, milestones


def ladder(trials: int, keep: int = 1, rf: int = 3, max_t: int = 27) -> Ladder:
    made = Ladder(SuccessiveHalving(milestones(1, max_t, rf), rf, "min", keep_at_least=keep), trials)
    made.admit(range(trials))
    made.admitted_all()
    return made


def climb(made: Ladder, devices: int, width: int, seed: int) -> tuple[list[int], int]:
    """Train groups on devices that are done in random order; a trial's score is its number. Finalists, and epochs."""
    rng = random.Random(seed)
    halving = made._halving
    under_way: list[tuple[int, list[int]]] = []
    trained = 0
    while True:
        if (rung := made.complete()) is not None:
            kept = halving.promote(rung[1])
            if made.decide(rung[0], kept):
                return list(kept[: halving.keep_at_least]), trained
            continue
        while len(under_way) < devices and (waiting := made.waiting()) is not None:
            start, stop, left = waiting
            made.begin(stop, left[:width])
            under_way.append((stop, left[:width]))
            trained += (stop - start) * len(left[:width])
        assert under_way, "the ladder neither waits for anything nor has anything to do"
        stop, group = under_way.pop(rng.randrange(len(under_way)))
        made.reach(stop, {trial: float(trial) for trial in group})


@pytest.mark.parametrize(("trials", "keep", "expected"), [(27, 1, 27 + 18 + 18), (27, 4, 27 + 18), (3, 4, 3)])
def test_one_device_trains_what_synchronous_halving_trains(trials: int, keep: int, expected: int) -> None:
    made = ladder(trials, keep, max_t=9)
    assert made.epochs == expected
    assert climb(made, devices=1, width=5, seed=0) == (list(range(min(trials, keep))), expected)


@pytest.mark.parametrize("seed", range(20))
def test_many_devices_find_the_best_and_train_little_more(seed: int) -> None:
    made = ladder(81, keep=3)
    finalists, trained = climb(made, devices=4, width=6, seed=seed)
    assert finalists == [0, 1, 2]
    # Each rung may promote early as many as it promotes in the end.
    assert made.epochs <= trained <= 2 * made.epochs


def test_a_free_device_goes_on_with_the_best_while_others_train() -> None:
    made = ladder(9)
    made.begin(1, range(9))
    made.reach(1, {n: float(n) for n in range(3, 9)})  # trials 0, 1, 2 are still under way
    assert made.complete() is None
    assert made.waiting() == (1, 3, [3, 4])
    made.begin(3, [3, 4])
    assert made.waiting() is None
    made.reach(1, {0: 0.0, 1: 1.0, 2: 2.0})
    stop, scores = made.complete() or (0, {})
    assert (stop, sorted(scores)) == (1, list(range(9)))
    assert not made.decide(1, [0, 1, 2])
    assert made.waiting() == (1, 3, [0, 1, 2])


def test_nobody_goes_on_early_where_the_next_decision_is_the_last() -> None:
    made = ladder(9, keep=3)
    made.begin(1, range(9))
    made.reach(1, {n: float(n) for n in range(6)})
    assert made.waiting() is None


def test_new_trials_go_before_promoted_ones() -> None:
    made = Ladder(SuccessiveHalving((1, 3, 9), 3, "min"), 12)
    made.admit(range(6))
    assert not made.hungry()
    made.begin(1, range(6))
    made.reach(1, {n: float(n) for n in range(6)})
    assert made.hungry()
    made.admit(range(6, 12))
    assert made.waiting() == (0, 1, list(range(6, 12)))


def test_the_best_so_far_came_furthest_and_did_not_diverge() -> None:
    made = ladder(9)
    made.reach(1, {n: float(n) for n in range(9)})
    made.decide(1, [0, 1, 2])
    made.reach(3, {0: math.nan, 1: 5.0, 2: 4.0})
    assert made.best(4) == [2, 1, 3, 4]
    assert made.above(1) == {0, 1, 2}
