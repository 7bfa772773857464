"""A surrogate as good as `stop_at` asks sends its trial to full size at once (Hydro's eager transfer)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hydro_rasda import RaceConfig, SweepConfig, TuneResult, Worker, load, tune, uniform
from hydro_rasda.cli.clean import remove_unneeded
from hydro_rasda.records.report import state_of

pytestmark = pytest.mark.usefixtures("one_process")

Rewards = Callable[[int, int, bool], float]
"""A function of a trial's number, its epoch, and whether it has full size."""


def model_fn(config: Mapping[str, Any], width_ratio: float = 1.0) -> nn.Module:
    width = int(16 * width_ratio)
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))


def searched(folder: Path, rewards: Rewards, **arguments: Any) -> tuple[TuneResult, list[tuple[int, int, bool]]]:
    """Search with made-up rewards; return the result, and the epochs in the order in which they were trained."""
    trained = list[tuple[int, int, bool]]()

    def train(worker: Worker) -> None:
        state = {"model": worker.model().state_dict()}
        while worker.iteration < worker.max_t:
            place = (int(worker.trial), worker.iteration + 1, worker.width_ratio == 1)
            trained.append(place)
            worker.report({"reward": rewards(*place)}, state)

    asked: dict[str, Any] = {
        "space": {"x": uniform(0, 1)},
        "train": train,
        "metric": "reward",
        "mode": "max",
        "num_samples": 6,
        "max_t": 8,
        "sweep": SweepConfig(reduction_factor=2),
        "race": RaceConfig(top_k=2),
        "name": "run",
        "resume": "changed",
        "progress": False,
    }
    return tune(model_fn, **asked | arguments, storage_path=folder), trained


def test_it_trains_at_full_size_before_others_go_on(tmp_path: Path) -> None:
    def rewards(trial: int, epoch: int, full: bool) -> float:
        return 1.0 if trial == 2 and epoch >= (2 if full else 1) else 0.1 * trial

    result, trained = searched(tmp_path, rewards, stop_at=1.0)
    assert trained == [(0, 1, False), (1, 1, False), (2, 1, False), (2, 1, True), (2, 2, True)]
    assert (result.best_trial, result.best_metric, result.cost.race_epochs) == (2, 1.0, 2)
    assert (result.finished, state_of(result), state_of(load(result.path))) == (True, "finished", "finished")
    again, trained = searched(tmp_path, rewards, stop_at=1.0)
    assert (again.best_trial, trained) == (2, [])


def test_a_later_call_that_asks_for_more_goes_on_with_the_sweep(tmp_path: Path) -> None:
    def rewards(trial: int, epoch: int, full: bool) -> float:
        return float(trial == 2) + 0.1 * trial

    whole, _ = searched(tmp_path, rewards, name="whole")
    searched(tmp_path, rewards, stop_at=1.0)
    result, trained = searched(tmp_path, rewards)
    assert (result.finished, result.best_trial) == (True, 2)
    assert (2, 1, True) not in trained, "its full-size epochs count"
    assert [record.history for record in result.trials] == [record.history for record in whole.trials]


def test_clean_leaves_what_a_later_call_that_asks_for_more_goes_on_from(tmp_path: Path) -> None:
    def rewards(trial: int, epoch: int, full: bool) -> float:
        return float(trial == 2) + 0.1 * trial

    trained = []
    for cleaned in (False, True):
        result, _ = searched(tmp_path, rewards, stop_at=1.0, name=f"cleaned-{cleaned}")
        if cleaned:
            remove_unneeded(result.path)
        trained.append(searched(tmp_path, rewards, name=f"cleaned-{cleaned}")[1])
    assert trained[1] == trained[0]


def test_if_full_size_is_worse_the_sweep_goes_on(tmp_path: Path) -> None:
    def rewards(trial: int, epoch: int, full: bool) -> float:
        if trial == 2:
            return 0.0 if full else 1.0
        return 1.0 if full and trial == 5 and epoch == 4 else 0.1 * trial

    result, trained = searched(tmp_path, rewards, stop_at=1.0)
    assert (result.finished, result.best_trial) == (True, 5)
    assert trained.count((2, 1, True)) == 1
    assert [place for place in trained if place[2]][:4] == [(2, epoch, True) for epoch in range(1, 5)]
    assert len({trial for trial, _, _ in trained}) == 6


def test_a_trial_that_raises_there_is_tried_once(tmp_path: Path) -> None:
    def rewards(trial: int, epoch: int, full: bool) -> float:
        if trial == 2 and full:
            raise ValueError("too wide")
        return 1.0 if trial == 2 else 0.1 * trial

    result, trained = searched(tmp_path, rewards, stop_at=1.0)
    assert (result.finished, result.best_trial) == (True, 5)
    assert "too wide" in str(result.trials[2].error)
    first = trained.index((2, 1, True))
    assert trained[first + 1] == (3, 1, False)


def test_a_sweep_at_full_width_ends_at_once(tmp_path: Path) -> None:
    """Its models are the full-size ones: there is nothing to train again."""

    def rewards(trial: int, epoch: int, full: bool) -> float:
        return 1.0 if trial == 4 and epoch == 2 else 0.1 * trial

    sweep = SweepConfig(reduction_factor=2, surrogate=1)
    result, trained = searched(tmp_path, rewards, stop_at=1.0, sweep=sweep)
    assert trained == [*((trial, 1, True) for trial in range(6)), (3, 2, True), (4, 2, True)]
    assert (result.best_trial, result.best_metric, result.trials[4].kept_epoch) == (4, 1.0, 2)
    assert (result.finished, state_of(result), state_of(load(result.path))) == (True, "finished", "finished")
    result.best_model()
    again, trained = searched(tmp_path, rewards, stop_at=1.0, sweep=sweep)
    assert (again.best_trial, trained) == (4, [])
    whole, _ = searched(tmp_path, rewards, sweep=sweep, name="whole")
    more, trained = searched(tmp_path, rewards, sweep=sweep)
    assert (4, 2, True) not in trained
    assert [record.history for record in more.trials] == [record.history for record in whole.trials]


def test_finalists_with_cheap_epochs_train_first(tmp_path: Path) -> None:
    """Without `stop_at`, and among trials whose epochs cost about the same, the best of the sweep comes first."""

    def rewards(trial: int, epoch: int, full: bool) -> float:
        time.sleep(0.1 if trial == 5 and not full else 0)
        return 0.1 * trial

    _, trained = searched(tmp_path, rewards, stop_at=9.0)
    assert next(place for place in trained if place[2])[0] == 4
    _, trained = searched(tmp_path, rewards, name="to the end")
    assert next(place for place in trained if place[2])[0] == 5
