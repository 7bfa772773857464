"""Numbers of the comparison with ASHA, by hand."""

import doctest
import math
from types import ModuleType
from typing import Any

import pytest

from benchmarks.vs_asha import statistics, words
from benchmarks.vs_asha.methods import timeline
from benchmarks.vs_asha.search import Event
from benchmarks.vs_asha.statistics import (
    Point,
    curve,
    ended,
    epochs,
    overall,
    reached,
    row,
    seed_spread,
    spread,
)
from benchmarks.vs_asha.yardsticks import ByChance, by_chance, yardsticks


def cell(events: list[list[float | None]], seed: int = 0, mode: str = "max", **values: Any) -> dict[str, Any]:
    winner, floor = {"trial": 0, "test": 0.8}, {"seconds": 2.0, "test": 0.8}
    rest = {"method": "ray_asha", "wall": 10.0, "apart": {}, "winner": winner, "floor": floor, "mode": mode}
    return {**rest, "seed": seed, "environment": {"cpu": "a processor"}, "settings": {}, "events": events, **values}


@pytest.mark.parametrize("module", [words, statistics], ids=lambda module: module.__name__)
def test_examples_in_the_docstrings(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert (outcome.failed, outcome.attempted > 0) == (0, True)


def test_quartiles_lie_between_the_values() -> None:
    assert spread([4.0, 1.0, 2.0]) == (2.0, 1.5, 3.0)
    assert spread([1.0, math.inf]) == (math.inf, math.inf, math.inf)


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_a_score_is_reached_by_full_size_models_alone(mode: str, sign: int) -> None:
    trained: list[list[Any]] = [
        [1.0, 0, 0, 1, 0.9, 0.9],
        [2.0, 0, 1, 1, 0.5, 0.5],
        [3.0, 0, 1, 2, None, None],
        [4.0, 0, 1, 3, 0.7, 0.7],
    ]
    events = [[*rest, score and sign * score, test] for *rest, score, test in trained]
    run = cell(events, mode=mode)
    assert reached(run, sign * 0.5) == 2.0
    assert reached(run, sign * 0.7) == 4.0
    assert reached(run, sign * 0.8) == math.inf


def test_the_curve_is_of_the_best_six_by_validation() -> None:
    """Trials 0 to 6 validate at 0.0 to 0.6 and test at ten times that; then trial 0 comes to 0.7 and 70, and ends."""
    first: list[list[float | None]] = [[i + 1.0, i, 0, 1, i / 10, float(i)] for i in range(7)]
    points = curve(cell([*first, [9.0, 0, 1, 1, 0.7, 70.0], [9.0, 1, 0, 2, None, None]]))
    assert points == [
        Point(6.0, (0 + 1 + 2 + 3 + 4 + 5) / 6, 4),  # trials 2 to 5 are over; 0 and 1 are not
        Point(7.0, (1 + 2 + 3 + 4 + 5 + 6) / 6, 5),
        # Both of second 9 count: trial 1 diverges, and is over.
        Point(9.0, (2 + 3 + 4 + 5 + 6 + 70) / 6, 7),
    ]


def test_a_row_compares_seed_by_seed() -> None:
    events: list[list[float | None]] = [[2.0, 0, 0, 1, 0.5, 0.5], [4.0, 0, 1, 1, 0.9, 0.8]]
    start = {"until the first trial began": 6.0}
    base = [
        cell([[3.0, 0, 1, 1, score, 0.7]], seed=seed, wall=wall, apart=start, winner={"trial": 0, "test": 0.7})
        for seed, wall, score in ((0, 20.0, 0.9), (1, 40.0, 0.95))
    ]
    own = [cell(events, seed=seed) for seed in (0, 1, 2)]
    found = row(own, base)
    assert found.speedup == (3.0, 2.5, 3.5)
    assert found.speedup_without_start is not None
    assert list(found.speedup_without_start) == pytest.approx([2.4, 1.9, 2.9])
    assert (found.reached, found.compared, found.cells) == (1, 2, 3)
    assert found.to_baseline is not None
    assert found.to_baseline.median == math.inf
    assert found.gain is not None
    assert found.gain.median == pytest.approx(0.1)
    assert found.floors is not None
    assert found.floors.median == 5.0
    assert (found.trials, found.surrogate_epochs.median, found.full_epochs.median) == (1, 1, 1)
    assert epochs(own[0]) == (1, 1)
    assert row(own, []).speedup is None


def test_times_on_other_machines_are_not_compared() -> None:
    """Scores are: the second seed's baseline, on a slower processor, counts for all but speed."""
    events: list[list[float | None]] = [[4.0, 0, 1, 1, 0.9, 0.8]]
    machines = ("a processor", "a slower one")
    base = [cell(events, seed, wall=20.0 + 60 * seed, environment={"cpu": cpu}) for seed, cpu in enumerate(machines)]
    found = row([cell(events, seed) for seed in (0, 1)], base)
    assert (found.compared, found.timed, found.reached) == (2, 1, 2)
    assert found.speedup == found.speedup_without_start == (2.0, 2.0, 2.0)
    elsewhere = row([cell(events, 1)], base)
    assert (elsewhere.speedup, elsewhere.speedup_to_baseline) == (None, None)
    assert elsewhere.gain is not None


def test_times_beside_other_work_do_not_count() -> None:
    """Scores do."""
    events: list[list[float | None]] = [[4.0, 0, 1, 1, 0.9, 0.8]]
    beside = {"cpu": "a processor", "timed": False}
    found = row([cell(events, environment=beside)], [cell(events, wall=20.0)])
    assert (found.compared, found.timed, found.reached) == (1, 0, 1)
    assert (found.wall, found.to_baseline, found.speedup, found.floors) == (None, None, None, None)
    assert found.gain == (0, 0, 0)


def test_the_baseline_takes_as_long_to_its_own_score_as_itself() -> None:
    base = cell([[1.0, 0, 1, 1, 0.4, 0.4], [2.0, 1, 1, 1, 0.7, 0.7], [3.0, 0, 1, 2, 0.9, 0.8]])
    assert ended(base) == 0.9
    found = row([base], [base])
    assert found.to_baseline == (3.0, 3.0, 3.0)
    assert found.speedup_to_baseline == found.speedup == (1.0, 1.0, 1.0)


def test_two_draws_give_a_variance() -> None:
    """(a - b)^2 / 2 of each pair, averaged: of 0.1 and 0.3, (0.01 + 0.09) / 4."""
    pairs = [cell([], winner={"test": 0.5 + d}, floor={"test": 0.5}) for d in (0.1, -0.3)]
    assert seed_spread(pairs) == pytest.approx(math.sqrt(0.1 / 4))
    averaged = cell([], winner={"test": 0.9}, floor={"test": 0.1}, settings={"averaged": True})
    assert seed_spread([*pairs, averaged]) == seed_spread(pairs)
    assert seed_spread([averaged]) == pytest.approx(math.sqrt(0.64 / 2))


def test_times_are_counted_back_from_the_end() -> None:
    """The last of units of 3, 1 and 4 s ends 1 s before all does: the first, which ended at 4, counts as of 5."""

    def metrics(heat: str, trial: int, epoch: int, score: float | None) -> dict[str, Any]:
        names = {"heat": heat, "trial": trial, "epoch": epoch}
        return {"event": "metrics", **names, "val_score": score, "val_test": score}

    journal = [
        metrics("sweep", 0, 1, 0.1),
        metrics("sweep", 0, 2, 0.2),
        metrics("sweep", 1, 1, None),
        {"event": "unit", "key": "sweep/to-2/group-0", "seconds": 3.0, "at": 4.0},
        {"event": "unit", "key": "sweep/to-2/kept", "seconds": 1.0, "at": 5.0},
        metrics("race", 0, 3, 0.3),
        metrics("race", 0, 4, 0.4),
        {"event": "unit", "key": "race/trial-0/to-4", "seconds": 4.0, "at": 9.0},
    ]
    found = timeline(journal, wall=10.0)
    assert [e for e in found if e.trial == 0] == [
        Event(3.5, 0, False, 1, 0.1, 0.1),
        Event(5.0, 0, False, 2, 0.2, 0.2),
        Event(8.0, 0, True, 3, 0.3, 0.3),
        Event(10.0, 0, True, 4, 0.4, 0.4),
    ]
    diverged = next(e for e in found if e.trial == 1)
    assert diverged.seconds == 3.5
    assert math.isnan(diverged.score)


def test_over_all_tasks() -> None:
    """One run of a task, two of another, which loses its test score by two spreads, and in one run its score."""

    def of(seed: int, score: float, test: float, mode: str) -> dict[str, Any]:
        winner, floor = {"trial": 0, "test": test}, {"test": test, "seconds": 2.0}
        return cell([[1.0, 0, 1, 1, score, test]], seed, mode, winner=winner, floor=floor, apart={"sweep": 1.0 + seed})

    better = {"ray_asha": [of(0, 0.9, 0.8, "max"), of(1, 0.9, 0.8, "max")], "tune": [of(0, 0.9, 0.8, "max")] * 1}
    worse = {"ray_asha": [of(0, 0.5, 0.1, "min"), of(1, 0.5, 0.1, "min")]}
    worse["tune"] = [of(0, 0.4, 0.3, "min"), of(1, 0.6, 0.3, "min")]
    for methods in (better, worse):  # trained again, each differs by 0.1
        for one in (each for cells in methods.values() for each in cells):
            one["floor"] = {**one["floor"], "test": one["winner"]["test"] + 0.1 * 2**0.5}
    found = overall({"better": better, "worse": worse}, "tune")
    assert (found.runs, found.reached, found.not_worse, found.lost) == (3, 2, 1, ["worse"])
    assert (found.again, found.again_not_worse) == (0, 0)
    assert found.sweeps == {"better": 0.5, "worse": 0.75}


def test_the_baseline_is_compared_with_itself_by_another_seed() -> None:
    """Three seeds end at .9, .8 and .7 and test at .6, .7 and .8, where one spread is .1.

    Of their six ordered pairs three reach, and one, which tests .2 lower, is worse. Ties reach both ways. A task with
    one seed says nothing, nor do seeds that split the examples in different ways.
    """

    def of(seed: int, score: float, test: float) -> dict[str, Any]:
        winner, floor = {"trial": 0, "test": test}, {"test": test + 0.1001 * 2**0.5, "seconds": 2.0}
        return cell([[1.0, 0, 1, 1, score, test]], seed, winner=winner, floor=floor)

    def split(one: dict[str, Any], number: int) -> dict[str, Any]:
        return {**one, "settings": {**one["settings"], "split": number}}

    apart = [of(0, 0.9, 0.6), of(1, 0.8, 0.7), of(2, 0.7, 0.8)]
    alike = [of(0, 0.5, 0.5), of(1, 0.5, 0.5)]
    tasks = {
        "apart": {"ray_asha": apart, "tune": apart[:2]},
        "alike": {"ray_asha": alike, "tune": alike[:1]},
        "alone": {"ray_asha": alike[:1], "tune": alike[:1]},
        "split": {"ray_asha": [split(alike[0], 0), split(apart[0], 1), split(alike[1], 0)], "tune": alike[:1]},
        "split each": {"ray_asha": [split(alike[0], 0), split(alike[1], 1)], "tune": alike[:1]},
    }
    found = {task: one[:2] for task, one in yardsticks(tasks).items()}
    assert found == {"apart": (3 / 6, 5 / 6), "alike": (1.0, 1.0), "split": (1.0, 1.0)}
    assert by_chance(tasks, "tune") == ByChance(4, 2 * 3 / 6 + 2, 2 * 5 / 6 + 2, 0, 0)


def test_configurations_that_were_trained_again_are_compared_by_that() -> None:
    """Each three times, .1 apart; winners of `tune` test as ASHA's, their configurations .2 worse and .05 better."""

    def of(seed: int, again: float) -> dict[str, Any]:
        more: dict[str, Any] = {"again": [again - 0.1, again, again + 0.1], "apart": {"sweep": 1.0}}
        winner = {"trial": 0, "test": 0.8}
        return cell([[1.0, 0, 1, 1, 0.9, 0.8]], seed, winner=winner, floor={"test": 0.0, "seconds": 2.0}, **more)

    methods = {"ray_asha": [of(0, 0.7), of(1, 0.65)], "tune": [of(0, 0.499), of(1, 0.7)]}
    assert seed_spread(methods["tune"]) == pytest.approx(0.1)
    found = overall({"task": methods}, "tune")
    assert (found.not_worse, found.again, found.again_not_worse) == (2, 2, 1)
    assert yardsticks({"task": methods})["task"].again_not_worse == 1.0
