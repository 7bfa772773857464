from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest

from fusion.keys import check
from hydro_rasda.schedulers import Continue, Mode, Stop, SweepRule, SweepState, rank
from hydro_rasda.schedulers.ranking import ranked
from hydro_rasda.schedulers.sweep_rule import (
    checked_admission,
    checked_finalists,
    checked_moves,
    move_of,
    plain_move,
)


class Idle(SweepRule):
    def decide(self, sweep: SweepState) -> Mapping[int, Any]:
        return {}


def sweep_of(scores: Mapping[int, float], mode: Mode = "min") -> SweepState:
    """Trials that came to epoch 3, and one that is on its way there, and one that was dropped."""
    sweep = SweepState(mode, 9, 2)
    for number in range(len(scores) + 2):
        sweep.admit(number, {"lr": 0.1, "own": 0.5})
        sweep.go_on(number, 3)
    for number, score in scores.items():
        sweep.come(number, {1: 1.0, 3: score})
    dropped = len(scores) + 1
    sweep.come(dropped, {3: 5.0})
    sweep.drop(dropped)
    return sweep


def test_where_trials_stand() -> None:
    sweep = sweep_of({0: 0.5, 1: math.nan})
    assert list(sweep.waiting) == list(sweep.waiting_at(3)) == [0, 1]
    assert list(sweep.training) == list(sweep.training_to(3)) == [2]
    assert sweep.trials[3].dropped
    assert sweep.scores[3].keys() == {0, 1, 3}
    assert (sweep.trials[0].score, sweep.trials[0].curve) == (0.5, {1: 1.0, 3: 0.5})
    assert math.isnan(sweep.trials[2].score)
    sweep.go_on(0, 9)
    sweep.go_on(3, 9)  # brought back
    assert (list(sweep.waiting), sorted(sweep.training), list(sweep.waiting_at(3))) == ([1], [0, 2, 3], [1])


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_is_ranked_as_everywhere(mode: Mode) -> None:
    rng = random.Random(0)
    values = [rng.choice([0.5, 1.0, math.nan, math.inf, rng.random()]) for _ in range(30)]
    sweep = SweepState(mode, 9, 2)
    for number in range(30):
        sweep.admit(number, {})
        sweep.go_on(number, 1)
    for number in rng.sample(range(30), 30):
        sweep.come(number, {1: values[number]})
    assert sweep.best(30) == [i for i in rank(values, mode) if math.isfinite(values[i])]
    assert sweep.best(3) == rank(values, mode)[:3]


def test_best_counts_those_that_came_since_it_was_asked_last() -> None:
    sweep = sweep_of({0: 0.5, 1: 0.7})
    assert sweep.best(2) == [0, 1]
    sweep.admit(2, {})
    sweep.go_on(2, 3)
    sweep.come(2, {3: 0.6})
    assert sweep.best(2) == [0, 2]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_leading_are_those_of_the_best_that_wait(mode: Mode) -> None:
    """Asked now and then, while trials come, some without a score, and go on or are dropped."""
    drawn, state = random.Random(0), SweepState(mode, 9, 2)
    for number in range(120):
        state.admit(number, {})
        state.go_on(number, 1)
    for number in drawn.sample(range(120), 120):
        state.come(number, {1: drawn.choice([math.nan, *(i / 10 for i in range(10))])})
        if drawn.random() < 0.5:
            continue
        count = drawn.randrange(len(state.scores[1]) + 3)
        scores = dict(sorted(state.scores[1].items()))
        best = [n for n in ranked(scores, mode)[:count] if math.isfinite(scores[n])]
        expected = [n for n in best if n in state.waiting_at(1)]
        assert state.leading(1, count) == state.leading(1, count) == expected
        for moved in drawn.sample(expected, len(expected) // 2):
            if drawn.random() < 0.5:
                state.go_on(moved, 3)
            else:
                state.drop(moved)
    assert state.leading(3, 5) == []


def test_a_move_survives_the_journal() -> None:
    for move in (Stop(), Continue(9), Continue(9, copy_of=0, changes={"lr": 0.5})):
        assert move_of(plain_move(move)) == move


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([1], r"^`sweep.rule Idle: decide\(...\)` is \[1\], but must be a dict of moves by trial"),
        ({7: Stop()}, "`sweep.rule` Idle moves trial 7, but must name one of trials 0 to 3"),
        ({0: 9}, "Idle: the move of trial 0` is 9, but must be a Continue or a Stop"),
        ({2: Stop()}, "the move of trial 2` is .* left out while the trial is on its way to epoch 3"),
        ({3: Stop()}, "the move of trial 3` is .* left out, for the trial was dropped before"),
        (
            {0: Continue(3)},
            "trial 0 goes on to epoch, which` is 3, but must be an epoch after 3, where",
        ),
        ({0: Continue(1)}, "trial 0 goes on to epoch, which` is 1, but must be an epoch after 3"),
        ({0: Continue(10)}, r"which` is 10, .* at most 9 \(`max_t`\)"),
        ({0: Continue(4.5)}, "which` is 4.5"),  # type: ignore[arg-type]
        (
            {0: Continue(9, copy_of=2)},
            "trial 0 has copy_of, which` is 2, but must be another trial that waits",
        ),
        ({0: Continue(9, copy_of=0)}, "copy_of, which` is 0"),
        ({0: Continue(9, copy_of=1)}, "copy_of, which` is 1, .* has not diverged"),
        ({1: Continue(9, copy_of=0, changes={"batch_size": 8})}, r"trial 1 has changes, of which` is \['batch_size'\]"),
        (
            {0: Continue(9, changes={"lr": 1.0})},
            r"changes, of which` is \['lr'\], but must be of .* with copy_of",
        ),
        ({0.0: Continue(9)}, "moves trial 0.0, but must name one of trials 0 to 3"),
        ({False: Continue(9)}, "moves trial False, but must name one of trials 0 to 3"),
        ({1: Continue(9, copy_of=0, changes=None)}, "changes, which` is None, but must be a dict"),  # type: ignore[arg-type]
        (
            {1: Continue(9, copy_of=0, changes={"lr": math.nan})},
            "trial 1 has changes with which `lr` is nan, but must be",
        ),
        ({1: Continue(9, copy_of=0, changes={"lr": "a"})}, "trial 1 has changes with which `lr` is 'a', but must be"),
        (
            {1: Continue(9, copy_of=0, changes={"beta1": 1.0})},
            r"changes with which `beta1` is 1.0, but must be in \[0, 1\)",
        ),
        ({1: Continue(9, copy_of=0, changes={"own": math.inf})}, "which` is {'own': inf}, but must be finite numbers"),
    ],
)
def test_what_cannot_be_done_is_told_with_rule_trial_and_value(moves: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_moves(Idle(), moves, sweep_of({0: 0.5, 1: math.nan}), check)


def test_what_can_be_done() -> None:
    sweep = sweep_of({0: 0.5, 1: math.nan})
    moves = {0: Continue(9), 1: Continue(4, copy_of=0, changes={"lr": 0.5}), 3: Continue(9)}
    assert checked_moves(Idle(), moves, sweep) == moves


def test_odd_answers_to_the_other_questions() -> None:
    sweep = sweep_of({0: 0.5})
    for count in (-1, 1.0, None, True):
        with pytest.raises(ValueError, match=r"^`sweep.rule Idle: admit\(...\)` is .*, but must be an int >= 0"):
            checked_admission(Idle(), count)  # type: ignore[arg-type]
    odd: list[Any] = [[0, 0], [9], None, 3, [0.0, 1.0], [True, False], "01", [[0]], {0, 1}, iter([0])]
    for finalists in odd:
        with pytest.raises(ValueError, match=r"Idle: finalists\(...\)` is .*, but must be different trials of 0 to 2"):
            checked_finalists(Idle(), finalists, sweep)
    assert checked_finalists(Idle(), (0, 2, 1), sweep) == [0, 2]
