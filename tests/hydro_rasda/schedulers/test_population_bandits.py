"""Population based bandits: their suggestions, and what they have in common with population based training."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from hydro_rasda.schedulers import (
    Continue,
    PopulationBasedBandits,
    PopulationBasedTraining,
    Range,
    Stop,
    SweepState,
    named_rule,
)
from hydro_rasda.schedulers.population_bandits import gains_of
from hydro_rasda.schedulers.sweep_rule import checked_moves
from hydro_rasda.schedulers.time_varying_bandit import Floats, TimeVaryingBandit

LR = Range(1e-4, 1.0, log=True)
RANGES: dict[str, Any] = {"lr": LR, "momentum": (0.0, 0.5, 0.9), "dropout": Range(0.0, 0.5)}


def observations(dimensions: int, count: int = 40) -> tuple[Floats, Floats, Floats, Floats]:
    generator = np.random.default_rng(0)
    points = generator.random((count, dimensions))
    times = np.repeat(np.arange(count // 8), 8).astype(float)
    before = generator.random(count)
    values = np.cos(5 * (points[:, 0] - 0.1 * times)) + 0.1 * before + 0.1 * generator.normal(size=count)
    return points, before, times, values


def bandit(dimensions: int = 1) -> TimeVaryingBandit:
    return TimeVaryingBandit(*observations(dimensions), now=5.0)


def expected_bound(of: TimeVaryingBandit, points: Floats, before: float) -> Floats:
    """The bound in closed form, with PB2's kernel written out."""
    seen, s, times, values = observations(points.shape[1])
    length, forgetting, noise = of._chosen

    def inputs(places: Floats, scores: Any) -> Floats:
        return np.column_stack([places, scores])

    def kernel(a: Floats, at: Any, b: Floats, bt: Any) -> Floats:
        distances = ((a[:, None] - b[None]) ** 2).sum(-1)
        apart = np.abs(np.asarray(at)[:, None] - np.asarray(bt)[None])
        covariance: Floats = np.exp(-distances / (2 * length**2)) * (1 - forgetting) ** (apart / 2)
        return covariance

    known, new = inputs(seen, s), inputs(points, np.full(len(points), before))
    inverse = np.linalg.inv(kernel(known, times, known, times) + noise * np.eye(len(known)))
    across = kernel(new, np.full(len(new), 5.0), known, times)
    mean = across @ inverse @ ((values - values.mean()) / values.std())
    variance = 1 - np.einsum("ij,jk,ik->i", across, inverse, across)
    bound: Floats = mean + math.sqrt(0.2 + math.log(0.4 * len(values))) * np.sqrt(variance)
    return bound


@pytest.mark.parametrize("dimensions", [1, 3])
def test_the_bound_is_that_of_pb2(dimensions: int) -> None:
    of = bandit(dimensions)
    points = np.random.default_rng(1).random((50, dimensions))
    np.testing.assert_allclose(of.bound(points, 0.5), expected_bound(of, points, 0.5), rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_a_suggestion_maximizes_the_bound_on_a_dense_grid(seed: int) -> None:
    of, grid = bandit(), np.linspace(0.0, 1.0, 10_001)[:, None]
    for _ in range(3):
        bounds = of.bound(grid, 0.5)
        (found,) = of.suggest(0.5, seed)
        assert of.bound(np.array([[found]]), 0.5)[0] >= bounds.max() - 1e-4
        of.expect([[found]], [0.5])  # the next one lies elsewhere


def test_points_that_will_be_observed_have_less_variance_and_the_same_mean() -> None:
    of, points = bandit(), np.linspace(0.0, 1.0, 11)[:, None]
    inputs = of._now_at(points, np.zeros(11))
    mean, deviation = of._model.predict(inputs, return_std=True)
    of.expect([[0.5], [0.5]], [0.0, 0.0])
    later, smaller = of._model.predict(inputs, return_std=True)
    np.testing.assert_allclose(later, mean, atol=1e-6)
    assert (smaller <= deviation + 1e-9).all()
    assert smaller[5] < 0.9 * deviation[5]


def population(scores: Mapping[int, float], at: int, seed: int = 0) -> SweepState:
    sweep = SweepState("min", 27, 2, seed)
    for number in scores:
        sweep.admit(number, {"lr": 0.01 * (number + 1), "momentum": 0.5, "dropout": 0.1})
        sweep.go_on(number, at)
    for number, score in scores.items():
        sweep.come(number, {at: score})
    return sweep


SCORES = {0: math.nan, 1: 0.3, 2: 0.1, 3: math.inf, 4: 0.2, 5: 0.4, 6: 0.15, 7: 0.6}


@pytest.mark.parametrize("changes", [{}, {"quantile": 0.5}, {"resample": 1.0}])
def test_copies_and_lists_are_those_of_population_based_training(changes: dict[str, Any]) -> None:
    suggested, perturbed = (
        of(RANGES, 9, **changes).decide(population(SCORES, 3))
        for of in (PopulationBasedBandits, PopulationBasedTraining)
    )
    assert suggested.keys() == perturbed.keys()
    for number, move in perturbed.items():
        ours = suggested[number]
        assert isinstance(move, Continue)
        assert isinstance(ours, Continue)
        assert (ours.to, ours.copy_of, ours.changes.keys()) == (move.to, move.copy_of, move.changes.keys())
        assert ours.changes.get("momentum") == move.changes.get("momentum")
        if move.changes:
            assert ours.changes != move.changes
            assert 1e-4 <= ours.changes["lr"] <= 1.0
            assert 0.0 <= ours.changes["dropout"] <= 0.5
            assert {type(value) for value in ours.changes.values()} == {float}


def test_it_decides_by_the_state_alone() -> None:
    rule, sweep = PopulationBasedBandits(RANGES, 9), population(SCORES, 3)
    moves = rule.decide(sweep)
    assert checked_moves(rule, moves, sweep) == moves
    assert rule.decide(population(SCORES, 3)) == moves
    assert rule.decide(population(SCORES, 3, seed=1)) != moves
    assert rule.decide(population({0: math.nan, 1: math.inf}, 3)) == {0: Stop(), 1: Stop()}
    alone = rule.decide(population({0: 0.5, 1: math.nan}, 3))[1]
    assert isinstance(alone, Continue)
    assert alone.copy_of == 0
    assert named_rule("pb2", (2, 6), 3, "min", 4, RANGES) == PopulationBasedBandits(RANGES, 6, interval=2)


def test_configurations_without_a_key_are_no_part_of_its_process() -> None:
    sweep = SweepState("max", 27, 2)
    for number in range(8):
        sweep.admit(number, {"lr": 0.1} if number % 2 else {"lr": 0.01, "dropout": 0.1 * number / 2})
        sweep.go_on(number, 1)
    for number in range(8):
        sweep.come(number, {1: float(number)})
    moves = PopulationBasedBandits(RANGES, 9).decide(sweep)
    copies = [move for move in moves.values() if isinstance(move, Continue) and move.copy_of is not None]
    assert [move.changes.keys() for move in copies] == [
        {"lr"} if (move.copy_of or 0) % 2 else {"lr", "dropout"} for move in copies
    ]


def test_a_copy_gains_from_where_the_copied_trial_stood() -> None:
    sweep = population({0: 4.0, 1: 2.0, 2: 3.0}, 1)
    sweep.go_on(0, 2, {"lr": 0.5}, copy_of=1)
    sweep.go_on(1, 2)
    sweep.go_on(2, 2)
    for number, score in {0: 1.0, 1: 1.5, 2: math.nan}.items():
        sweep.come(number, {2: score})
    first, second = (
        [(gain.config["lr"], gain.before, gain.gain) for gain in gains_of(sweep) if gain.start == start]
        for start in (0, 1)
    )
    # Losses of 4, 2 and 3 from nothing; a median absolute deviation of 1.
    unit = 1 / 1.4826
    assert first == [(0.01, 0.0, -unit), (0.02, 0.0, unit), (0.03, 0.0, 0.0)]
    # Trials 0 and 1 began at 2, trial 2 at 3; they gained 1, 0.5 and nothing finite.
    assert [lr for lr, *_ in second] == [0.5, 0.02, 0.03]
    assert [before for _, before, _ in second] == [0.0, 0.0, pytest.approx(-1 / math.sqrt(2 / 9))]
    assert [gain for *_, gain in second] == [pytest.approx(unit), pytest.approx(-unit), -3.0]


def trained(rule: PopulationBasedTraining, rate: Callable[[float, float], float], members: int, seed: int) -> float:
    """Train a population in memory; returns the best loss, the logarithm of which falls by `rate(share, time)`."""
    sweep, drawn = SweepState("min", rule.last, 1, seed), random.Random(seed)
    losses = dict.fromkeys(range(members), 0.0)
    for number in losses:
        sweep.admit(number, {"lr": LR.at(drawn.random())})
    while moves := rule.decide(sweep):
        before = dict(losses)
        for number, move in moves.items():
            assert isinstance(move, Continue)
            source = number if move.copy_of is None else move.copy_of
            config = {**sweep.trials[source].config, **move.changes}
            moved = rate(LR.share(config["lr"]), sweep.trials[number].epoch / rule.last)
            losses[number] = before[source] - moved + 0.02 * drawn.gauss(0.0, 1.0)
            sweep.go_on(number, move.to, config, move.copy_of)
        for number in moves:
            sweep.come(number, {sweep.trials[number].goal or 0: losses[number]})
    return min(losses.values())


def drifting(share: float, time: float) -> float:
    """The best rate falls by three orders of magnitude; what is far off it gains nothing."""
    return math.exp(-(((share - (0.85 - 0.7 * time)) / 0.12) ** 2))


def test_it_follows_a_best_learning_rate_that_drifts_sooner_than_random_changes_do() -> None:
    def losses(of: type[PopulationBasedTraining]) -> Iterator[float]:
        for seed in range(3):
            yield trained(of({"lr": LR}, last=12), drifting, 8, seed)

    ours, random_ones = [*losses(PopulationBasedBandits)], [*losses(PopulationBasedTraining)]
    assert np.mean(ours) < np.mean(random_ones) - 1.0
