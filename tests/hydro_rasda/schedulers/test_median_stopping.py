"""Median stopping against Ray Tune's rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.tune.schedulers import MedianStoppingRule, TrialScheduler

from hydro_rasda.schedulers import MedianStopping, Mode
from tests.hydro_rasda.schedulers.played import Curves, play


def curves(count: int, seed: int, length: int = 12) -> list[list[float]]:
    steps = np.random.default_rng(seed).normal(size=(count, length))
    drawn: list[list[float]] = steps.cumsum(1).tolist()
    return drawn


@dataclass(frozen=True)
class _RayTrial:
    """All that Ray Tune's rule asks of a trial."""

    trial_id: int


def by_ray(scores: Curves, mode: Mode, grace_period: int) -> list[int]:
    """By trial, the epoch at which Ray Tune's rule stops it; all trials report an epoch before any is decided."""
    rule = MedianStoppingRule("t", "score", mode, grace_period=grace_period, min_samples_required=3)
    nobody: Any = SimpleNamespace(get_live_trials=list)
    trials: list[Any] = [_RayTrial(number) for number in range(len(scores))]
    ended = [len(scores[0])] * len(scores)
    for epoch in range(1, len(scores[0]) + 1):
        there = [number for number in range(len(scores)) if ended[number] >= epoch]
        for number in there:
            rule._results[trials[number]].append({"t": epoch, "score": scores[number][epoch - 1]})
        for number in there:
            # It notes a report before it decides: here the report is taken out again, as if it came in this moment.
            report = rule._results[trials[number]].pop()
            if rule.on_trial_result(nobody, trials[number], report) == TrialScheduler.STOP:
                ended[number] = epoch
    return ended


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("grace_period", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_it_stops_whom_ray_tunes_rule_stops(mode: Mode, grace_period: int, seed: int) -> None:
    scores = curves(20, seed)
    sweep = play(MedianStopping(12, grace_period), scores, mode)
    found = [trial.epoch for trial in sweep.trials.values()]
    assert found == by_ray(scores, mode, grace_period)
    assert min(found) < max(found) == 12


def test_few_trials_stop_nobody_and_what_diverged_stops_always() -> None:
    scores = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [math.nan, 4.0]]
    sweep = play(MedianStopping(2), scores)
    assert [trial.epoch for trial in sweep.trials.values()] == [2, 2, 2, 1]


@pytest.mark.parametrize("at_once", [1, 4])
def test_on_several_devices_the_sweep_ends_and_the_best_is_a_finalist(at_once: int) -> None:
    rule, scores = MedianStopping(12), [[number + 1 / epoch for epoch in range(1, 13)] for number in range(20)]
    sweep = play(rule, scores, at_once=at_once)
    assert not sweep.training
    assert rule.finalists(sweep)[0] == 0


@pytest.mark.parametrize("bad", [{"last": 0}, {"last": 2, "grace_period": 3}, {"last": 2, "min_trials": 0}])
def test_bad_arguments_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"`{[*bad][-1]}` is {[*bad.values()][-1]}, but must be"):
        MedianStopping(**bad)
