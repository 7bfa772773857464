"""What trainings take: reckoned, measured, corrected, and kept for later runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hydro_rasda import SweepConfig
from hydro_rasda.common.trial import Trial
from hydro_rasda.problem.problem import Problem
from hydro_rasda.processes.memory_estimates import Peaks, kind_of_group, kind_of_own, kind_of_target
from hydro_rasda.run.cache import cache_folder
from hydro_rasda.schedulers.packing_policy import GUESS


@pytest.fixture
def problem(problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problem:
    """On a machine where nothing was measured yet."""
    monkeypatch.setenv("HYDRO_RASDA_CACHE", str(tmp_path / "cache"))
    return replace(problem, peak=70.0)


def test_what_is_measured_takes_the_place_of_what_was_reckoned(problem: Problem) -> None:
    peaks = Peaks(problem, "sweep")
    assert peaks.expected("kind", 4) == 0
    peaks.estimate("kind", {1: 20, 8: 90})
    assert [peaks.expected("kind", members) for members in (1, 3, 8, 16)] == [20, 60, 90, 180]
    peaks.learn("kind", 8, 60)
    peaks.learn("kind", 8, 50)  # the most counts
    assert [peaks.expected("kind", members) for members in (1, 8, 16)] == [60, 60, 120]


def test_an_unknown_kind_is_taken_for_larger_than_the_largest_member(problem: Problem) -> None:
    peaks = Peaks(problem, "sweep")
    peaks.learn("a", 8, 80)
    peaks.learn("b", 1, 30)
    assert peaks.expected("c", 2) == GUESS * 2 * 30


def test_full_size_models_are_at_first_taken_for_what_the_dry_run_ran(problem: Problem) -> None:
    peaks = Peaks(problem, "race")
    assert peaks.expected("kind") == 70
    peaks.learn("other", 1, 20)
    assert peaks.expected("kind") == GUESS * 20


def test_what_matters_is_kept_for_later_runs(problem: Problem) -> None:
    first = Peaks(problem, "sweep")
    first.learn("kind", 2, 100)
    first.estimate("small", {1: 1})
    first.keep(room=1000)
    assert not cache_folder().exists()  # as many as there are cores fit, and half as many again
    first.keep(room=120)
    later = Peaks(problem, "sweep")
    assert later.expected("kind", 2) == 100
    assert Peaks(problem, "race").expected("kind", 2) == 70
    assert Peaks(problem.with_settings(sweep=SweepConfig(surrogate=0.25)), "sweep").expected("kind", 2) == 0
    later.learn("kind", 2, 200)
    later.keep(room=120)
    assert Peaks(problem, "sweep").expected("kind", 2) == 200


def test_what_hardly_changed_is_not_written_again(problem: Problem) -> None:
    def written_again(change: Callable[[Peaks], None]) -> bool:
        peaks = Peaks(problem, "sweep")
        change(peaks)
        before = file.stat().st_mtime_ns
        peaks.keep(room=0)
        return file.stat().st_mtime_ns != before

    peaks = Peaks(problem, "sweep")
    peaks.learn("kind", 2, 100)
    peaks.estimate("other", {1: 100})
    peaks.keep(room=0)
    (file,) = cache_folder().iterdir()
    assert not written_again(lambda peaks: peaks.learn("kind", 2, 104))
    assert not written_again(lambda peaks: peaks.estimate("other", {1: 104}))
    assert written_again(lambda peaks: peaks.learn("kind", 2, 106))
    assert written_again(lambda peaks: peaks.estimate("other", {1: 106}))
    assert written_again(lambda peaks: peaks.estimate("other", {1: 100}))


@pytest.mark.parametrize("odd", [None, [], {"kind": 3}, {"kind": {"two": 1}}, {"kind": {"2": -1, "0": 3}}])
def test_odd_content_is_left_out(problem: Problem, odd: object) -> None:
    peaks = Peaks(problem, "sweep")
    peaks.learn("kind", 2, 100)
    peaks.keep(room=0)
    (file,) = cache_folder().iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "measured": odd}))
    assert Peaks(problem, "sweep").expected("kind", 2) == 0


def test_kinds_of_full_size_models_are_told_by_what_may_change_their_size() -> None:
    trial = Trial(0, {"lr": 0.1, "optimizer": "sgd", "batch_size": 32, "depth": 2})
    alike, *others = (
        kind_of_target(Trial(1, {**trial.config, **changes}))
        for changes in ({"lr": 0.2, "momentum": 0.9}, {"depth": 3}, {"optimizer": "adamw"}, {"batch_size": 64})
    )
    assert alike == kind_of_target(trial)
    assert len({alike, *others}) == 4
    adam = Trial(2, {**trial.config, "optimizer": "adam"})
    assert kind_of_group("k", [adam, trial]) == kind_of_group("k", [trial, adam]) != kind_of_group("k", [trial])


def test_kinds_of_trials_of_ones_own_loop_differ_in_all_but_floats() -> None:
    kinds = [
        kind_of_own(Trial(0, config)) for config in ({"lr": 0.1, "depth": 2}, {"lr": 0.2, "depth": 2}, {"depth": 3})
    ]
    assert kinds[0] == kinds[1] != kinds[2]
    assert kind_of_own(Trial(1, {"depth": 2.0})) != kinds[0]
