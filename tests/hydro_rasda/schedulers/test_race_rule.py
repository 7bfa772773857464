from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hydro_rasda import RaceConfig
from hydro_rasda.schedulers import (
    Continue,
    ExpectedEnd,
    Race,
    RaceRule,
    Stop,
    SweepState,
    chances,
    expected_gain,
)
from hydro_rasda.schedulers.race_rule import BEHIND, ERROR, WORTH, expected_improvement, final_score
from hydro_rasda.settings.config import TuneConfig
from tests.hydro_rasda.schedulers.played import Curves, play

RACE = {"max_t": 4, "mode": "min", "reduction_factor": 2, "full_trainings": 2.5}


def race(**changed: Any) -> Race:
    return Race(**{**RACE, **changed})


@pytest.mark.parametrize(
    ("scores", "full_trainings", "kept"),
    [
        ([0.9, 0.50, 0.52, 0.54], 4, [1, 2, 3, 0]),
        ([0.9, 0.50, 0.52, 0.54], 2.5, [1, 2]),  # what the budget is enough for
        ([0.9, 0.50, 0.52, 0.54], 0, [1, 2]),  # one in two, whatever the budget
        ([0.9, math.nan, math.inf, 0.9], 4, [0, 3]),
        ([math.nan] * 4, 4, []),
    ],
)
def test_the_best_go_on_as_many_as_the_budget_is_enough_for(
    scores: list[float], full_trainings: float, kept: list[int]
) -> None:
    assert race(full_trainings=full_trainings).promote(1, dict(enumerate(scores)), trained=4) == kept


@pytest.mark.parametrize(("max_t", "stops"), [(1, (1,)), (2, (1, 2)), (7, (4, 7)), (9, (5, 7, 9)), (27, (14, 21, 27))])
def test_the_first_comparison_is_at_half_of_a_training_and_costs_no_more_than_three(
    max_t: int, stops: tuple[int, ...]
) -> None:
    settings = TuneConfig(max_t=max_t)
    assert settings.race_milestones == stops
    rule = race(max_t=max_t, full_trainings=settings.full_trainings)
    left = rule.promote(stops[0], dict(enumerate([0.4, 0.3, 0.2, 0.1])), trained=4 * stops[0])
    assert left[:2] == [3, 2]
    # Of an odd number of epochs, one epoch of a finalist more.
    assert 4 * stops[0] + len(left) * (max_t - stops[0]) <= 3 * max_t + 1
    asked = TuneConfig(max_t=max_t, race=RaceConfig(grace_period=1))
    assert asked.race_milestones[0] == 1


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_last_look_stops_who_promises_too_little_for_its_price(mode: Any) -> None:
    """A trial goes on up to the gap at which its expected improvement is its price; one that diverged is out."""
    sign, usual, stop, max_t = (1.0 if mode == "max" else -1.0), 0.2, 6, 8
    curves = {n: {3: -sign * usual, 6: 0.0} for n in range(4)}
    deviation = math.sqrt(2) * ERROR * usual * math.log2(max_t / stop)
    least = WORTH * usual * (max_t - stop) / max_t
    gaps = np.linspace(0, 1, 10_001)
    gap = float(gaps[[expected_improvement(-g, deviation) >= least for g in gaps.tolist()]].max())
    rule = race(max_t=max_t, mode=mode)
    for behind, kept in ((gap - 1e-3, [1, 0]), (gap + 1e-3, [1])):
        scores = {0: -sign * behind, 1: 0.0, 2: -sign, 3: math.nan}
        assert rule.worthwhile(stop, scores, curves) == kept
    assert 0.1 * usual < gap < usual


def test_where_nothing_changes_any_more_the_leader_alone_goes_on() -> None:
    curves = {n: {3: 0.5, 6: 0.5} for n in range(3)}
    assert race(max_t=8).worthwhile(6, {0: 0.9, 1: 0.5, 2: 0.5}, curves) == [1]


def test_without_a_change_to_judge_by_none_is_stopped_at_the_last_look() -> None:
    rule = race(max_t=8)
    assert rule.worthwhile(6, {0: 0.5, 1: 0.4}, {0: {6: 0.5}, 1: {6: 0.4}}) == [1, 0]
    assert rule.worthwhile(6, {0: math.nan, 1: math.inf}, {0: {}, 1: {}}) == []
    assert rule.worthwhile(6, {0: math.nan, 1: 0.4}, {0: {}, 1: {3: 0.5, 6: 0.4}}) == [1]


def test_the_expected_improvement_is_that_of_a_simulation() -> None:
    drawn = np.random.default_rng(0).standard_normal(400_000)
    for ahead, deviation in ((0.0, 0.5), (-0.7, 0.5), (0.3, 2.0)):
        simulated = np.maximum(ahead + deviation * drawn, 0.0).mean()
        assert expected_improvement(ahead, deviation) == pytest.approx(simulated, rel=0.02)


def test_a_stopped_trial_is_expected_to_change_as_those_that_went_on() -> None:
    full = {0: {2: 0.5}, 1: {2: 0.6, 4: 0.3}, 2: {2: 0.6, 4: 0.5}}
    found = race().expected_ends(full)
    deviation = ERROR * math.sqrt((0.3**2 + 0.1**2) / 2)
    assert found[0].end == pytest.approx(0.5 - 0.2)
    assert (found[0].deviation, found[0].shared) == pytest.approx((deviation, deviation / math.sqrt(2)))
    assert (found[1], found[2]) == (ExpectedEnd(0.3, 0.0), ExpectedEnd(0.5, 0.0))
    # What averages are worth in the end tells nothing of a trial that was stopped.
    credited = race().expected_ends(full, ends={1: 0.1, 2: 0.5})
    assert credited == found | {1: ExpectedEnd(0.1, 0.0)}


def test_before_any_has_ended_nothing_is_known() -> None:
    found = race().expected_ends({0: {2: 0.5}, 1: {2: 0.6, 3: 0.3}, 2: {}})
    assert {n: (outlook.end, outlook.deviation) for n, outlook in found.items() if n < 2} == {
        0: (0.5, math.inf),
        1: (0.3, math.inf),
    }
    assert chances(found, "min") == {0: 0.5, 1: 0.5, 2: 0.0}


def test_one_whose_training_ended_by_itself_is_certain() -> None:
    full = {0: {1: 0.5, 2: 0.4}, 1: {1: 0.6, 2: 0.45, 4: 0.2}}
    assert race().expected_ends(full, over=[0]) == {0: ExpectedEnd(0.4, 0.0), 1: ExpectedEnd(0.2, 0.0)}


def test_going_on_makes_none_of_those_that_were_alike_better_or_worse() -> None:
    """Whatever the one that went on came to."""
    for end in (0.1, 0.5, 0.9):
        found = chances(race().expected_ends({0: {1: 0.95, 4: end}, **{n: {1: 0.95} for n in (1, 2, 3)}}), "min")
        assert [*found.values()] == pytest.approx([0.25] * 4, abs=0.02)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_chances_are_those_of_a_simulation(mode: Any) -> None:
    sign = 1.0 if mode == "max" else -1.0
    ends, deviations = [0.5, 0.2, 0.48, 0.4], [0.1, 0.2, 0.0, 0.3]
    expected_ends = {n: ExpectedEnd(sign * end, deviation) for n, (end, deviation) in enumerate(zip(ends, deviations))}
    drawn = np.random.default_rng(0).standard_normal((200_000, 4))
    values = np.array(ends) + np.array(deviations) * drawn
    expected = np.bincount(values.argmax(1), minlength=4) / len(values)
    found = chances(expected_ends, mode)
    assert sum(found.values()) == pytest.approx(1.0)
    assert [*found.values()] == pytest.approx(expected.tolist(), abs=0.01)


def test_what_is_shared_moves_all_together() -> None:
    expected_ends = {0: ExpectedEnd(0.5, 0.0), 1: ExpectedEnd(0.6, 0.1, 0.3), 2: ExpectedEnd(0.6, 0.2, 0.1)}
    drawn = np.random.default_rng(0).standard_normal((200_000, 4))
    values = np.array([0.5, 0.6, 0.6]) + np.array([0.0, 0.1, 0.2]) * drawn[:, :3]
    values += np.array([0.0, 0.3, 0.1]) * drawn[:, 3:]
    expected = np.bincount(values.argmin(1), minlength=3) / len(values)
    assert [*chances(expected_ends, "min").values()] == pytest.approx(expected.tolist(), abs=0.015)


def test_what_ended_is_certain_and_equals_share() -> None:
    known = {0: ExpectedEnd(0.5, 0.0), 1: ExpectedEnd(0.4, 0.0), 2: ExpectedEnd(0.4, 0.0)}
    assert chances(known, "min") == {0: 0.0, 1: 0.5, 2: 0.5}
    assert chances({n: ExpectedEnd(math.inf, 1.0) for n in known}, "min") == {0: 0.0, 1: 0.0, 2: 0.0}
    assert chances({}, "min") == {}


def test_the_gain_of_another_one_is_that_of_another_draw() -> None:
    """Of four exponential draws, the last one beats the best of the first three by as much, on average."""
    drawn = np.random.default_rng(0).exponential(size=(20_000, 4))
    foretold = [expected_gain([ExpectedEnd(end, 0.0) for end in three], "max") for three in drawn[:, :3].tolist()]
    gains = np.maximum(drawn[:, 3] - drawn[:, :3].max(1), 0)
    assert np.mean(foretold) == pytest.approx(gains.mean(), rel=0.05)
    assert math.isnan(expected_gain([ExpectedEnd(0.5, 0.3), ExpectedEnd(math.nan, 0.0)], "min"))


CURVES = [[0.9, 0.8, 0.7, 0.6], [0.8, 0.7, 0.6, 0.5], [0.7, 0.6, 0.5, 0.4], [0.6, 0.5, 0.4, 0.3]]
"""Four trials, the best last, which are compared after epochs 1, 2 and 4."""


def rule(milestones: tuple[int, ...] = (1, 2, 4), look: int | None = None, worth: bool = True, **race: Any) -> RaceRule:
    return RaceRule(Race(**{**RACE, **race}), milestones, look, worth)


def epochs(sweep: SweepState) -> list[int]:
    """The last milestone of each trial."""
    return [trial.epoch for _, trial in sorted(sweep.trials.items())]


def came(scores: Mapping[int, float], stop: int = 2, **fields: Any) -> SweepState:
    """Trials that came to epoch 2 together."""
    sweep = SweepState("min", 4, 4)
    for number, score in scores.items():
        sweep.admit(number, {})
        sweep.go_on(number, stop)
        sweep.come(number, {stop: score})
    vars(sweep).update(fields)
    return sweep


@pytest.mark.parametrize(
    ("full_trainings", "trained"),
    [
        (0, [1, 1, 2, 4]),
        (2.5, [1, 1, 4, 4]),  # 4 epochs to the first milestone; of 10, 6 are left, for two times 3
        (2.49, [1, 1, 2, 4]),
        (3.25, [1, 4, 4, 4]),
        (4, [4, 4, 4, 4]),
    ],
)
def test_as_many_go_on_as_can_train_to_the_end(full_trainings: float, trained: list[int]) -> None:
    raced = play(rule(full_trainings=full_trainings), CURVES)
    assert epochs(raced) == trained
    assert rule(full_trainings=full_trainings).finalists(raced) == [3, 2][: max(1, trained.count(4) // 2)]


@pytest.mark.parametrize(
    ("behind", "settings", "trained"),
    [
        (0.01, {"look": 6}, [8, 8, 4, 4]),  # behind by a twelfth of what scores changed by in three epochs
        (0.3, {"look": 6}, [8, 6, 4, 4]),
        (0.3, {"look": 6, "worth": False}, [8, 8, 4, 4]),
        (0.3, {"look": None, "full_trainings": 3}, [8, 8, 4, 4]),
    ],
)
def test_from_the_last_look_the_second_goes_on_if_it_is_worth_it(
    behind: float, settings: dict[str, Any], trained: list[int]
) -> None:
    leader = [1.0 - 0.04 * epoch for epoch in range(8)]
    curves = [[score + more for score in leader] for more in (0.0, behind, 0.5, 0.6)]
    raced = play(rule((4, 6, 8), **{"max_t": 8, "full_trainings": 3, **settings}), curves)
    assert epochs(raced) == trained


LOST = [*CURVES[:2], [0.7, math.nan, math.nan, math.nan], [0.6, math.nan, math.nan, math.nan]]


@pytest.mark.parametrize(
    ("curves", "trained"),
    [
        (LOST, [1, 4, 2, 2]),
        ([*CURVES[:2], [0.7], [0.6]], [1, 4, 2, 2]),
        ([LOST[0], [0.8, 0.7], *LOST[2:]], [4, 4, 2, 2]),
        ([[math.nan] * 4, [math.nan] * 4, *LOST[2:]], [1, 1, 2, 2]),
        ([*CURVES[:2], [0.7], [0.6, 0.5, 0.4, math.nan]], [1, 4, 2, 4]),
        ([*CURVES[:3], [0.6, 0.5]], [1, 1, 4, 4]),
    ],
    ids=["diverged", "failed", "twice", "all", "at the end", "who was stopped last"],
)
def test_if_nobody_is_left_the_best_of_those_stopped_last_go_on(curves: Curves, trained: list[int]) -> None:
    raced = play(rule(full_trainings=0), curves)
    assert epochs(raced) == trained
    assert not raced.training


def test_who_comes_back_trains_to_where_the_others_were_lost() -> None:
    """Trial 1 was stopped last, but has no score there."""
    curves = [[0.8, 0.7, 0.6, 0.5], [0.7, math.nan, math.nan, math.nan], [0.6, 0.5], [0.9, 0.9, 0.9, 0.9]]
    raced = play(rule((1, 2, 3, 4), full_trainings=0), curves)
    assert [part.start for part in raced.trials[0].intervals] == [0, 1, 3]
    assert epochs(raced) == [4, 2, 3, 1]


def test_who_ended_by_itself_is_not_compared_and_nobody_comes_back() -> None:
    raced = came({0: 0.9, 1: 0.8, 2: 0.1, 3: 0.2}, ended={2: "done", 3: "failed"})
    assert rule(full_trainings=0).decide(raced) == {1: Continue(4), 0: Stop()}
    raced.drop(0)
    raced.go_on(1, 4)
    raced.come(1, {})
    raced.ended |= {1: "failed"}
    assert rule().decide(raced) == {}
    assert rule().finalists(raced) == []
    raced.ended |= {2: "failed"}
    assert rule().decide(raced) == {0: Continue(4)}
    raced.ended |= {0: "diverged"}
    assert rule().decide(raced) == {}


def test_who_diverged_counts_among_those_that_are_compared() -> None:
    scores = {0: 0.5, 1: 0.4, 2: math.nan, 3: math.nan}
    keeps = {1: Continue(4), 0: Continue(4), 2: Stop(), 3: Stop()}
    assert rule(full_trainings=0).decide(came(scores, ended={2: "diverged", 3: "diverged"})) == keeps
    one_of_two = {1: Continue(4), 0: Stop()}
    assert rule(full_trainings=0).decide(came(scores, ended={2: "failed", 3: "failed"})) == one_of_two


def test_the_trial_with_the_best_averages_goes_on_too_but_not_as_the_last() -> None:
    scores = {0: 0.6, 1: 0.7, 2: 0.8}
    raced = came(scores, averages={2: {0: 0.5, 2: 0.3}})
    assert rule(full_trainings=0).decide(raced) == {0: Continue(4), 2: Continue(4), 1: Stop()}
    ended = came(scores, stop=4, averages={4: {0: 0.5, 2: 0.3}})
    assert rule(full_trainings=0).decide(ended) == {}
    assert rule(full_trainings=0).finalists(ended) == [0]


@pytest.mark.parametrize("look", [None, 2])
def test_at_chance_level_all_with_a_score_go_on(look: int | None) -> None:
    raced = came({0: 0.6, 1: 0.7, 2: math.nan}, at_chance=True)
    assert rule(look=look, full_trainings=0).decide(raced) == {0: Continue(4), 1: Continue(4), 2: Stop()}


def test_the_mode_is_that_of_the_state() -> None:
    """Places among several metrics are better the lower they are."""
    raced = came({0: 0.2, 1: 0.9})
    raced.place(2, {0: 1.0, 1: 0.0})
    assert rule(mode="max", full_trainings=0).decide(raced) == {1: Continue(4), 0: Stop()}


def drawn(seed: int) -> Curves:
    """Curves of six trials, some of which diverge or fail."""
    rng = random.Random(seed)
    curves = [[rng.choice([0.5, rng.random()]) for _ in range(4)] for _ in range(6)]
    for curve in curves:
        last = rng.choice([1, 1, 2, 3, 4, 4])
        curve[last:] = rng.choice([[], [math.nan] * (4 - last)])
    return [*curves, [0.9] * 4]


@pytest.mark.parametrize("seed", range(20))
def test_decisions_do_not_depend_on_the_order_in_which_trials_come(seed: int) -> None:
    """They wait for all, so that the number of devices does not matter either."""
    ruled, curves = rule(look=3, milestones=(1, 2, 3, 4)), drawn(seed)
    together = play(ruled, curves)
    assert max(epochs(together)) == 4
    for at_once, order in ((1, 0), (1, 1), (2, 0)):
        raced = play(ruled, curves, at_once=at_once, seed=order)
        assert sorted(raced.waiting) == sorted(together.waiting)
        assert [trial.intervals for _, trial in sorted(raced.trials.items())] == [
            trial.intervals for _, trial in sorted(together.trials.items())
        ]
        assert ruled.finalists(raced) == ruled.finalists(together)


def test_there_is_nothing_to_decide_before_any_trial_enters() -> None:
    assert rule().decide(SweepState("min", 4, 2)) == {}


@pytest.mark.parametrize(
    ("own", "averaged", "first", "final"),
    [
        (0.32, 0.3, 0.7, 0.32),  # not far behind its averages
        (0.9, 0.3, 0.7, 0.3 + BEHIND * 0.4),
        (0.2, 0.3, 0.7, 0.2),
        (0.9, 0.3, 0.1, 0.3),  # nothing was gained
        (0.9, 0.3, math.nan, 0.3),
        (0.9, 0.3, math.inf, 0.3),
        (0.5, math.nan, 0.7, 0.5),
        (0.5, -math.inf, 0.7, 0.5),
        (math.nan, 0.3, 0.7, math.nan),
        (math.inf, 0.3, 0.7, math.inf),
    ],
)
def test_averages_that_are_far_better_count_instead_of_the_trained_weights(
    own: float, averaged: float, first: float, final: float
) -> None:
    assert final_score(own, averaged, first, "min") == pytest.approx(final, nan_ok=True)
    assert final_score(-own, -averaged, -first, "max") == pytest.approx(-final, nan_ok=True)
