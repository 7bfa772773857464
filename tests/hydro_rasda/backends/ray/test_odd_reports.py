"""Reports, requests and stores of scripts that were written for another scheduler."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray import tune

from benchmarks.ray_stand_in import StandInController, stand_in_trial
from hydro_rasda import RASDAScheduler
from hydro_rasda.backends.ray import read_journal
from hydro_rasda.backends.ray.ray_private_names import store_results
from hydro_rasda.schedulers.rasda import Grow


@pytest.fixture(autouse=True)
def _two_slots_and_warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    caplog.set_level(logging.WARNING, logger="hydro_rasda")


def started(folder: Path, **arguments: Any) -> tuple[RASDAScheduler, StandInController, Any]:
    """One trial that trains."""
    scheduler = RASDAScheduler(max_t=8, metric="loss", mode="min", **arguments)
    controller = StandInController(scheduler, [], str(folder))
    controller._add()
    chosen: Any = scheduler.choose_trial_to_run(controller)
    chosen.status = "RUNNING"
    return scheduler, controller, chosen


@pytest.mark.parametrize("steps", [None, "1", math.nan, math.inf, torch.ones(2), np.ones(2)])
def test_a_report_without_a_number_of_iterations_decides_nothing(
    steps: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a trial that fails with such a checkpoint starts as a new one."""
    scheduler, controller, trial = started(tmp_path, time_attr="steps")
    report = {"steps": steps, "loss": 0.0, "should_checkpoint": True}
    assert scheduler.on_trial_result(controller, trial, report) == "CONTINUE"
    assert "has no number 'steps': it decides nothing" in caplog.text
    trial.latest_checkpoint_result = SimpleNamespace(metrics=report)
    scheduler.on_trial_error(controller, trial)
    trial.status = "PENDING"
    scheduler.on_trial_add(controller, trial)
    assert len(trial.placement_group_factory.bundles) == 1
    scheduler.on_trial_complete(controller, trial, report)


@pytest.mark.parametrize("grow", ["due", "efficient"])
@pytest.mark.parametrize("value", [None, "12 s", [1.0], math.nan, torch.ones(2)])
def test_the_names_of_measurements_may_have_other_values(value: object, grow: Grow, tmp_path: Path) -> None:
    scheduler, controller, trial = started(tmp_path, grow=grow)
    names = ("epoch_seconds", "scaling_efficiency", "gradient_noise_scale", "global_batch_size")
    report = {"training_iteration": 1, "loss": 0.0, "should_checkpoint": True, **dict.fromkeys(names, value)}
    assert scheduler.on_trial_result(controller, trial, report) == "PAUSE"
    (entry,) = read_journal(str(tmp_path))
    assert entry.global_batch_size is None


def test_a_number_that_is_too_large_for_a_score_decides_nothing(tmp_path: Path) -> None:
    scheduler, controller, trial = started(tmp_path)
    assert scheduler.on_trial_result(controller, trial, {"training_iteration": 1, "loss": 10**400}) == "CONTINUE"


def test_a_trial_that_asha_would_let_continue_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script may report NaN for each epoch without a validation."""
    scheduler, controller, trial = started(tmp_path)
    assert scheduler.on_trial_result(controller, trial, {"training_iteration": 1, "loss": math.nan}) == "STOP"
    assert "is stopped at iteration 1, where its 'loss' is NaN. ASHAScheduler would let it continue" in caplog.text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (tune.PlacementGroupFactory([{}, {"CPU": 1}]), "[{}, {'CPU': 1.0}]"),
        (tune.PlacementGroupFactory([{"CPU": 1}], strategy="SPREAD"), "[{'CPU': 1.0}] (SPREAD)"),
    ],
)
def test_another_group_of_the_same_bundles_is_named(
    asked: tune.PlacementGroupFactory,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An actor of a trial's own, for which the empty bundle leaves the other one, would wait for ever."""
    made = stand_in_trial(0, str(tmp_path))
    made.placement_group_factory = asked
    monkeypatch.setattr("benchmarks.ray_stand_in.stand_in_trial", lambda number, folder: made)
    started(tmp_path)
    assert f"Trainable 'stand_in' asks for {said}, but a new trial gets [{{'CPU': 1.0}}], by the" in caplog.text


def test_an_experiment_that_cannot_be_restored_does_not_go_on(tmp_path: Path) -> None:
    """Ray only logs such an error, and would save a state without the trials. Here the storage answers again."""
    (tmp_path / "rasda.jsonl").write_text("no entry\n")
    scheduler = RASDAScheduler(max_t=8, metric="loss", mode="min")
    controller = StandInController(scheduler, [], str(tmp_path))
    for number in range(2):
        with pytest.raises(ValueError, match=r"rasda\.jsonl"):
            scheduler.on_trial_add(controller, stand_in_trial(number, str(tmp_path)))
        (tmp_path / "rasda.jsonl").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=r"rasda\.jsonl"):
            scheduler.choose_trial_to_run(controller)
    assert scheduler.set_search_properties(None, None)
    scheduler.on_trial_add(controller, stand_in_trial(2, str(tmp_path)))


def test_an_experiment_goes_on_if_results_cannot_be_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trial = stand_in_trial(0, str(tmp_path))
    trial.checkpoint, trial.storage.trial_fs_path = "a checkpoint", str(tmp_path / "folder" / "that is gone")
    (tmp_path / "result.json").touch()
    store_results(trial)
    assert "result.json may lack rows: it could not be written before trial" in caplog.text
