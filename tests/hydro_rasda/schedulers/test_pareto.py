"""Fronts, crowding, epsilon-nets and hypervolumes: closed forms, and Optuna's own on random points."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from hydro_rasda.schedulers.pareto import (
    crowding,
    epsilon_net,
    front_of,
    fronts,
    hypervolume,
    places,
    violation,
)


def drawn(count: int, axes: int, seed: int, decimals: int) -> list[tuple[float, ...]]:
    """Random points; rounded, so that some are equal in an objective or in all."""
    values = np.round(np.random.default_rng(seed).random((count, axes)), decimals)
    return [tuple(map(float, row)) for row in values]


CASES = [(count, axes, seed) for count in (1, 2, 40) for axes in (1, 2, 3) for seed in (0, 1)]


@pytest.mark.parametrize(("count", "axes", "seed"), CASES)
@pytest.mark.parametrize("decimals", [1, 6])
def test_the_fronts_are_optunas(count: int, axes: int, seed: int, decimals: int) -> None:
    optuna = pytest.importorskip("optuna.study._multi_objective")
    points = drawn(count, axes, seed, decimals)
    expected = optuna._fast_non_domination_rank(np.array(points))
    found = fronts(points)
    assert sorted(index for front in found for index in front) == [*range(count)]
    assert all(expected[index] == rank for rank, front in enumerate(found) for index in front)


@pytest.mark.parametrize(("count", "axes", "seed"), CASES)
def test_the_hypervolume_is_optunas(count: int, axes: int, seed: int) -> None:
    optuna = pytest.importorskip("optuna._hypervolume")
    points = drawn(count, axes, seed, 2)
    reference = (0.9,) * axes
    inside = np.array([point for point in points if max(point) <= 0.9]).reshape(-1, axes)
    expected = optuna.compute_hypervolume(inside, np.array(reference)) if len(inside) else 0.0
    assert hypervolume(points, reference) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_crowding_distance_is_that_of_nsga_ii(seed: int) -> None:
    optuna = pytest.importorskip("optuna.samplers.nsgaii._elite_population_selection_strategy")
    trial = pytest.importorskip("optuna.trial")
    points = drawn(30, 2, seed, 6)
    front = [points[i] for i in fronts(points)[0]]
    trials = [trial.create_trial(values=list(point)) for point in front]
    for number, each in enumerate(trials):
        each.number = number
    expected = optuna._calc_crowding_distance(trials)
    assert crowding(front) == pytest.approx([expected[number] for number in range(len(front))])


def test_a_circle_has_the_hypervolume_of_its_steps() -> None:
    # Points on a line from (0, 1) to (1, 0): n steps below the diagonal of a square.
    n = 50
    points = [(i / n, 1 - i / n) for i in range(n + 1)]
    assert hypervolume(points, (1.0, 1.0)) == pytest.approx(0.5 * (1 - 1 / n))


def test_nothing_dominates_itself_or_an_equal_point() -> None:
    for axes in ((), (1.0,)):
        low, high = (*axes, 1.0, 2.0), (*axes, 1.0, 3.0)
        assert fronts([low, low]) == [[0, 1]]
        assert fronts([high, low]) == [[1], [0]]


def test_the_net_covers_a_line_by_halving_it() -> None:
    points = [(float(i), float(8 - i)) for i in range(9)]
    assert epsilon_net(points)[:3] == [0, 8, 4]
    assert {*epsilon_net(points)[3:5]} == {2, 6}
    assert sorted(epsilon_net(points)) == [*range(9)]


def test_an_axis_in_other_units_changes_no_place() -> None:
    points = dict(enumerate(drawn(20, 2, 0, 6)))
    scaled = {n: (loss, 1e9 * macs) for n, (loss, macs) in points.items()}
    for spread in ("crowding", "epsilon-net"):
        assert places(points, ("min", "min"), spread=spread) == places(scaled, ("min", "min"), spread=spread)


def test_a_maximum_is_the_minimum_of_its_negative() -> None:
    points = dict(enumerate(drawn(20, 2, 1, 6)))
    flipped = {n: (loss, -macs) for n, (loss, macs) in points.items()}
    assert places(points, ("min", "min")) == places(flipped, ("min", "max"))
    assert front_of(points, ("min", "min")) == front_of(flipped, ("min", "max"))


def test_one_objective_is_ranked_as_without_objectives() -> None:
    from hydro_rasda.schedulers import rank

    scores = [point[0] for point in drawn(30, 1, 2, 1)]
    found = places({n: (score,) for n, score in enumerate(scores)}, ("max",))
    assert sorted(found, key=found.__getitem__) == rank(scores, "max")


def test_diverged_trials_have_no_place_and_broken_constraints_come_last() -> None:
    points = {0: (0.1, math.nan), 1: (0.9, 0.9), 2: (0.2, 0.2), 3: (0.1, 0.1), 4: (math.inf, 0.0)}
    found = places(points, ("min", "min"), {3: 0.2, 2: 0.1})
    assert math.isnan(found[0])
    assert math.isnan(found[4])
    assert [found[n] for n in (1, 2, 3)] == [0, 1, 2]


def test_a_value_that_is_not_known_breaks_its_bounds_without_end() -> None:
    assert violation({}, {"macs": (None, 1.0)}) == math.inf
    assert violation({"macs": 1.0}, {"macs": (None, 1.0)}) == 0.0
    assert violation({"macs": 0.5}, {"macs": (0.0, None)}) == 0.0
    assert violation({"macs": -2.0}, {"macs": (0.0, None)}) == 2.0


@pytest.mark.parametrize("axes", [2, 3])
def test_thousands_of_trials_are_sorted_without_a_wait(axes: int) -> None:
    """A sweep sorts them again whenever trials arrive, and comparing each with each takes seconds."""
    line = [(float(n), float(-n), 0.0)[:axes] for n in range(4000)]
    began = time.process_time()
    assert fronts(line) == [[*range(4000)]]
    assert time.process_time() - began < 3


def test_a_thousand_trials_are_placed_without_a_wait() -> None:
    points = dict(enumerate(drawn(1000, 2, 3, 6)))
    found = places(points, ("min", "min"))
    assert sorted(found.values()) == [float(place) for place in range(1000)]
