"""Population based training against Ray Tune's."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import pbt

from hydro_rasda.schedulers import Continue, Mode, PopulationBasedTraining, Range, Stop, SweepState
from hydro_rasda.schedulers.named_rules import named_rule
from hydro_rasda.schedulers.sweep_rule import checked_moves

RANGES: dict[str, Any] = {"lr": Range(1e-6, 10.0, log=True), "momentum": (0.0, 0.5, 0.9), "dropout": Range(0.0, 100.0)}


def rule(**changes: Any) -> PopulationBasedTraining:
    return PopulationBasedTraining(**{"explored": RANGES, "last": 9, **changes})


class RayTrial:
    def is_finished(self) -> bool:
        return False


def by_ray(scores: Mapping[int, float], quantile: float, mode: Mode) -> tuple[set[int], set[int]]:
    """Whom Ray Tune's rule replaces, and whom it copies."""
    scheduler = pbt.PopulationBasedTraining(
        metric="score", mode=mode, hyperparam_mutations={"lr": [1.0]}, quantile_fraction=quantile
    )
    trials: dict[Any, int] = {RayTrial(): number for number in scores}
    sign = -1.0 if mode == "min" else 1.0
    scheduler._trial_state = {t: SimpleNamespace(last_score=sign * scores[n]) for t, n in trials.items()}
    lower, upper = scheduler._quantiles()
    return {trials[trial] for trial in lower}, {trials[trial] for trial in upper}


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 33])
def test_it_replaces_and_copies_whom_ray_tunes_rule_does(mode: Mode, quantile: float, count: int) -> None:
    rng = random.Random(count)
    scores = {number: rng.gauss(0.0, 1.0) for number in range(count)}
    lower, upper = rule(quantile=quantile).quantiles(scores, mode)
    expected = by_ray(scores, quantile, mode)
    assert ({*lower}, {*upper} if lower else set()) == expected


def numbers(seed: int) -> Iterator[float]:
    rng = random.Random(seed)
    while True:
        yield rng.random()


@pytest.mark.parametrize("resample", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("seed", range(20))
def test_it_explores_as_ray_tune_does_from_the_same_draws(
    monkeypatch: pytest.MonkeyPatch, resample: float, seed: int
) -> None:
    config = {"lr": 0.1, "momentum": 0.5, "dropout": 0.3, "batch_size": 64}
    draws = numbers(seed)
    drawn = SimpleNamespace(random=lambda: next(draws), choice=lambda of: of[int(next(draws) * len(of))])
    monkeypatch.setattr(pbt, "random", drawn)

    def sampled(name: str) -> Any:
        return lambda: RANGES[name].at(next(draws))

    mutations = {"lr": sampled("lr"), "momentum": list(RANGES["momentum"]), "dropout": sampled("dropout")}
    expected, _ = pbt._explore(config, mutations, resample, (1.2, 0.8), None)
    changes = rule(resample=resample, factors=(1.2, 0.8)).explore(config, numbers(seed))
    assert {**config, **changes} == expected


def test_values_stay_in_their_range_and_missing_keys_stay_missing() -> None:
    of = rule(explored={"momentum": Range(0.5, 0.95), "beta1": Range(0.0, 0.9), "p": (0.1, 0.2)}, resample=0.0)
    for seed in range(20):
        changes = of.explore({"momentum": 0.9, "p": 0.2}, numbers(seed))
        assert changes.keys() == {"momentum", "p"}
        assert changes["momentum"] in (pytest.approx(0.72), 0.95)
        assert changes["p"] in (0.1, 0.2)
    drawn = [Range(0.01, 1.0, log=True).at(share / 1000) for share in range(1000)]
    assert sum(value < 0.1 for value in drawn) == 500


def population(scores: Mapping[int, float], at: int, seed: int = 0) -> SweepState:
    sweep = SweepState("min", 27, 2, seed)
    for number in scores:
        sweep.admit(number, {"lr": 0.1 * (number + 1), "momentum": 0.5, "dropout": 0.1})
        sweep.go_on(number, at)
    for number, score in scores.items():
        sweep.come(number, {at: score})
    return sweep


def test_the_population_is_decided_together() -> None:
    of = rule(interval=2)
    sweep = SweepState("min", 27, 2)
    sweep.left = 1
    sweep.admit(0, {"lr": 0.1})
    assert of.decide(sweep) == {0: Continue(2)}
    sweep.go_on(0, 2)
    sweep.come(0, {1: 0.2, 2: 0.1})
    assert of.decide(sweep) == {}  # one more is to be admitted
    sweep.left = 0
    sweep.admit(1, {"lr": 0.2})
    assert of.decide(sweep) == {1: Continue(2)}
    sweep.go_on(1, 2)
    sweep.idle = True
    assert of.decide(sweep) == {}  # and trains
    sweep.come(1, {1: 0.4, 2: 0.3})
    moves = of.decide(sweep)
    assert moves[0] == Continue(4)
    assert isinstance(moves[1], Continue)
    assert (moves[1].to, moves[1].copy_of) == (4, 0)
    assert of.epochs(sweep) == 2 * 9


def test_who_diverged_becomes_a_copy_and_where_all_did_nobody_goes_on() -> None:
    scores = {0: math.nan, 1: 0.3, 2: 0.1, 3: math.inf, 4: 0.2, 5: 0.4}
    sweep = population(scores, 3)
    moves = rule().decide(sweep)
    copies = {n: move.copy_of for n, move in moves.items() if isinstance(move, Continue) and move.copy_of is not None}
    assert copies == {0: 2, 3: 2, 5: 2}
    assert checked_moves(rule(), moves, sweep) == moves
    lost = population({0: math.nan, 1: math.inf}, 3)
    assert rule().decide(lost) == {0: Stop(), 1: Stop()}
    assert rule(quantile=0.0).decide(population({0: math.nan, 1: 0.1}, 3)) == {0: Stop(), 1: Continue(4)}
    sweep.go_on(0, 4, {"lr": 0.1}, copy_of=1)
    sweep.come(0, {4: 0.05})
    assert sweep.best(1) == [0]


def test_it_ends_at_the_last_epoch_and_decides_by_seed_epoch_and_trial_alone() -> None:
    scores = {number: float(number) for number in range(64)}
    assert rule(last=3).decide(population(scores, 3)) == {}
    assert all(move.to == 4 for move in rule(last=4, interval=2).decide(population(scores, 3)).values())  # type: ignore[union-attr]
    one, other = (rule().decide(population(scores, 3)) for _ in range(2))
    assert one == other
    assert rule().decide(population(scores, 3, seed=1)) != one
    assert rule().decide(population(scores, 4)) != one
    sources = {move.copy_of for move in one.values() if isinstance(move, Continue)} - {None}
    assert len(sources) > 4


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"explored": {}}, "`explored` is {}, but must be a dict of at least one hyperparameter"),
        ({"explored": {"lr": 0.1}}, "`explored` is .*, but must be a dict"),
        ({"explored": {"lr": Range(0.0, 1.0, log=True)}}, "`explored` is .*, but must be a dict"),
        ({"explored": {"lr": Range(1.0, 0.1)}}, "`explored` is .*, but must be a dict .* a rising `Range`"),
        ({"quantile": 0.6}, r"`quantile` is 0.6, but must be in \[0, 0.5\]"),
        ({"resample": math.nan}, r"`resample` is nan, but must be in \[0, 1\]"),
        ({"factors": ()}, r"`factors` is \(\), but must be a list of numbers > 0"),
        ({"factors": (1.2, 0.0)}, r"`factors` is \(1.2, 0.0\), but must be a list of numbers > 0"),
        ({"interval": 0}, "`interval` is 0"),
        ({"last": 0}, "`last` is 0"),
    ],
)
def test_bad_arguments_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(**bad)


def test_the_ends_of_a_range_and_a_single_factor_are_allowed() -> None:
    for least in (True, False):
        rule(quantile=0 if least else 0.5, resample=0 if least else 1, factors=(0.5,))


def test_its_name_makes_it() -> None:
    found = named_rule("pbt", (2, 6), 3, "min", 4, RANGES)
    assert found == PopulationBasedTraining(RANGES, 6, interval=2)
