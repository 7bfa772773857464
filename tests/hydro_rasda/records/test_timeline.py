"""The timeline of a run, from units of its journal."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.history.lines import JournalLine, Unit, failure_line, metric_lines
from hydro_rasda.records.timeline import Best, Training, best_over_time, busy_share, trainings
from hydro_rasda.settings.config import Mode
from tests.hydro_rasda.records.test_report import RECORD


def full_size(trial: int, epoch: int, seconds: float, at: float, **value: Any) -> tuple[str, Unit]:
    key = f"race/trial-{trial}/to-{epoch}"
    return key, Unit({"checkpoint": key, **value}, [], seconds, at=at)


def test_a_training_takes_the_first_lane_of_its_device_that_is_free() -> None:
    """A lane is free up to a fiftieth of the training's length before the last training there has ended."""
    spans = [(0.0, 100.0), (50.0, 150.0), (97.0, 197.0), (99.0, 199.0), (160.0, 260.0)]
    units = [full_size(trial, 1, ended - began, ended, device=0) for trial, (began, ended) in enumerate(spans)]
    units.append(full_size(5, 1, 10.0, 110.0, device=1))
    found = trainings(dict(units))
    assert {each.trials: each.lane for each in found} == {(0,): 0, (1,): 1, (2,): 2, (3,): 0, (4,): 1, (5,): 0}
    assert [each.began for each in found] == sorted(each.began for each in found)


def test_a_full_size_model_that_shared_its_device_began_earlier_and_goes_on_where_it_was() -> None:
    units = [full_size(3, 2, 10.0, 40.0, beside=3), full_size(3, 5, 10.0, 60.0), full_size(3, 9, 0.0, 70.0, swept=True)]
    assert trainings(dict(units)) == [
        Training("race", (3,), 0, 2, began=10.0, ended=40.0),
        Training("race", (3,), 2, 5, began=50.0, ended=60.0),
    ]


@pytest.mark.parametrize("ended", [False, True])
def test_epochs_since_the_last_checkpoint_count_while_the_run_goes_on(ended: bool) -> None:
    def epochs(trial: int, *scores: float) -> list[JournalLine]:
        return metric_lines("race", trial, [(at, {"val_loss": score}) for at, score in enumerate(scores, 1)])

    units = {
        "race/trial-0/at-1": Unit(None, epochs(0, 0.5), at=10.0),
        "race/trial-1/to-1": Unit({"checkpoint": "race/trial-1/to-1"}, epochs(1, 0.4), at=20.0),
        "race/trial-2/at-1": Unit(None, epochs(2, 0.1), at=25.0),
        "race/trial-2/failed-after-0": Unit(None, [failure_line(2, "out of memory")], at=30.0),
    }
    found = best_over_time(units, replace(RECORD, ended=ended))
    assert found == {"race": [*([] if ended else [Best(10.0, 0.5, 0, 1)]), Best(20.0, 0.4, 1, 1)]}


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([(0.0, 10.0), (5.0, 15.0), (20.0, 30.0)], 25 / 30),
        ([(20.0, 30.0), (0.0, 10.0), (5.0, 15.0)], 25 / 30),
        ([(0.0, 20.0), (5.0, 10.0), (15.0, 20.0)], 1.0),
        ([(10.0, 20.0), (30.0, 40.0)], 2 / 3),
        ([(3.0, 3.0)], 1.0),
        ([], math.nan),
    ],
)
def test_the_busy_share_is_that_of_the_time_in_which_any_trained(
    spans: list[tuple[float, float]], share: float
) -> None:
    trained = [Training("race", (n,), 0, 1, began, ended) for n, (began, ended) in enumerate(spans)]
    assert busy_share(trained) == pytest.approx(share, nan_ok=True)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_only_scores_that_were_better_than_all_before_are_listed(mode: Mode) -> None:
    sign = 1.0 if mode == "min" else -1.0
    told: list[tuple[HeatName, float, float]] = [
        ("sweep", 30.0, 0.2),
        ("sweep", 10.0, 0.5),
        ("sweep", 20.0, 0.5),
        ("sweep", 25.0, math.nan),
        ("sweep", 40.0, 0.3),
        ("race", 50.0, 0.9),
    ]
    units = {
        f"{heat}/to-1/from-0/group-{at}": Unit(None, metric_lines(heat, 0, [(1, {"val_loss": sign * score})]), at=at)
        for heat, at, score in told
    }
    found = best_over_time(units, replace(RECORD, mode=mode))
    assert {heat: [(best.seconds, best.score) for best in of] for heat, of in found.items()} == {
        "sweep": [(10.0, sign * 0.5), (30.0, sign * 0.2)],
        "race": [(50.0, sign * 0.9)],
    }


def test_the_groups_of_a_task_trained_beside_each_other() -> None:
    value = {"members": [0, 1, 2], "groups": [[0, 2], [1]], "stop": 3, "device": 1}
    units = {
        "sweep/to-3/from-0/group-0": Unit(value, [], 20.0, at=20.0),
        "middle/to-1/from-0/group-0": Unit({**value, "groups": None, "stop": 1}, [], 5.0, at=30.0),
    }
    assert trainings(units) == [
        Training("sweep", (0, 2), 0, 3, 0.0, 20.0, 1, lane=0),
        Training("sweep", (1,), 0, 3, 0.0, 20.0, 1, lane=1),
        Training("middle", (0, 1, 2), 0, 1, 25.0, 30.0, 1, lane=0),
    ]
