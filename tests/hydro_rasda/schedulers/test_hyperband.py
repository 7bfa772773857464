"""Hyperband against Ray Tune's brackets."""

from __future__ import annotations

import numpy as np
import pytest
from ray.tune.schedulers.hyperband import HyperBandScheduler, _Bracket

from hydro_rasda.schedulers import Hyperband, Mode, SuccessiveHalving
from hydro_rasda.schedulers.milestones import milestones
from tests.hydro_rasda.schedulers.played import Curves, play

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
