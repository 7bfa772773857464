from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hydro_rasda.history.lines import ERROR_CHARS, Unit, failure_line, metric_lines
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.events import Callbacks, EpochsTrained, Event, MessageSaid
from hydro_rasda.run.journal import read_messages
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.run.time_left import Piece


def test_a_unit_is_done_once_and_leaves_nothing_if_it_raises(problem: Problem, tmp_path: Path) -> None:
    done: list[int] = []
    lines = metric_lines("sweep", 0, [(1, {"val_loss": 0.5})])

    def work() -> Unit:
        done.append(len(done))
        time.sleep(0.001)
        return Unit([*done], lines)

    for _ in range(2):
        with Store.open(tmp_path / "run", {}, "auto") as store:
            run = Run(problem, store)
            with pytest.raises(ZeroDivisionError):
                run.unit("check/b", lambda: Unit(1 // 0))
            unit = run.unit("check/a", work)
            assert (unit.value, unit.lines) == ([0], lines)
            assert 0 < unit.seconds <= store.seconds
            assert list(store.units()) == ["check/a"]
    assert done == [0]
    assert store.recorded == 1


def test_a_decision_is_taken_once_over_the_same_candidates_and_anew_over_others(
    problem: Problem, tmp_path: Path
) -> None:
    def decided(candidates: list[int], kept: list[int]) -> list[int]:
        with Store.open(tmp_path / "run", {}, "auto") as store:
            run = Run(problem, store)
            return run.decide("check/to-3/chosen", candidates, lambda: kept)

    assert decided([0, 1, 2], [2]) == [2]
    assert decided([2, 1, 0], [0]) == [2]
    assert decided([0, 1, 2, 3], [3]) == [3]
    assert decided([0, 1, 4], [4]) == [4]
    assert decided([0, 1, 2], [1]) == [2]


def test_the_time_left_is_said_but_not_kept(problem: Problem, tmp_path: Path) -> None:
    said: list[str] = []
    with Store.open(tmp_path / "run", {}, "auto") as store:
        run = Run(problem, store)
        run.callbacks = Callbacks([lambda event: said.append(event.text) if isinstance(event, MessageSaid) else None])
        run.time_left.plan("sweep", [Piece(100, 400.0)])
        run.begin_heat("sweep", 100)
        run.advance(1)
        run.say("sweep at epoch 1: 2 of 4 go on")
    assert [text for text in said if text.startswith("About ") and text.endswith(" left.")] == said[:1]
    assert [message.text for message in read_messages(tmp_path / "run")] == said[1:] != []


def test_a_time_budget_bounds_the_time_left(problem: Problem, tmp_path: Path) -> None:
    heard: list[Event] = []
    timed = replace(problem, settings=replace(problem.settings, time_budget_s=100.0))
    with Store.open(tmp_path / "run", {}, "auto") as store:
        run = Run(timed, store, Callbacks([heard.append]))
        run.time_left.plan("sweep", [Piece(100, 400.0)])
        run.begin_heat("sweep", 100)
        run.advance(1)
    *_, told, trained = heard
    assert isinstance(told, MessageSaid)
    assert told.text == "About 100 s left."
    assert isinstance(trained, EpochsTrained)
    assert trained.seconds_left == pytest.approx(100.0 - trained.seconds, abs=1.0)


@pytest.mark.parametrize(("mode", "best"), [("min", "0.25"), ("max", "0.5")])
def test_an_epoch_is_noted_by_its_best_finite_score(problem: Problem, tmp_path: Path, mode: str, best: str) -> None:
    with Store.open(tmp_path / "run", {}, "auto") as store:
        run = Run(problem.with_settings(mode=mode), store)
        assert run.note({"val_loss": [0.5, math.nan, 0.25], "train_loss": [0.1, 0.1, 0.9]}) == f"val_loss {best}"
        assert run.note({"val_loss": [math.nan, math.inf]}) == ""


def test_a_traceback_is_kept_as_far_as_a_person_would_read_it() -> None:
    short, long = "Traceback\nValueError: 3", "Traceback" + "x" * 10**6 + "ValueError: 3"
    assert failure_line(0, short)["error"] == short
    kept = failure_line(0, long)["error"]
    assert len(kept) < ERROR_CHARS + 100
    assert kept.startswith("Traceback")
    assert kept.endswith("ValueError: 3")
    assert f"[{len(long) - ERROR_CHARS} characters are left out]" in kept
