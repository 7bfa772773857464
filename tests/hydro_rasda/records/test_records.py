from __future__ import annotations

import math
import pickle
import re
from dataclasses import replace

from hydro_rasda.records.records import COLUMNS, NO_METRICS, by_heat
from hydro_rasda.results import Cost, TrialRecord
from hydro_rasda.settings.config import HISTORY


def test_spared_seconds() -> None:
    # 100 surrogate epochs at the 2 s of a full-size epoch would have taken 200 s; they took 50 s.
    cost = Cost(
        sweep_epochs=100,
        sweep_seconds=50.0,
        race_epochs=10,
        race_seconds=35.0,
        race_epoch_seconds=2.0,
        seconds=95.0,
    )
    assert cost.spared_seconds == 150.0
    assert math.isnan(replace(cost, race_epoch_seconds=math.nan).spared_seconds)


def test_the_middle_heat_is_one_of_a_runs_heats_only_if_it_trained() -> None:
    cost = Cost(16, 8.0, 6, 12.0, 2.0, 20.0, middle_epochs=8, middle_seconds=4.0)
    assert [*by_heat(cost).items()] == [("sweep", (16, 8.0)), ("middle", (8, 4.0)), ("race", (6, 12.0))]
    assert [*by_heat(replace(cost, middle_epochs=0))] == ["sweep", "race"]


RECORD = TrialRecord(
    trial=0,
    config={"lr": 0.1},
    status="stopped",
    sweep_metric=0.5,
    sweep_epochs=1,
    metric=float("nan"),
    epochs=0,
    chance=float("nan"),
    kept_epoch=0,
    history=({"epoch": 1, "val_loss": None},),
    error=None,
)


def test_records_without_a_score_are_equal_by_value() -> None:
    record = RECORD
    assert record == replace(record, metric=float("nan")) == pickle.loads(pickle.dumps(record))
    assert record != replace(record, metric=0.5)
    assert record != replace(record, config={"lr": 0.2})
    assert record != 0


def test_a_record_is_shown_by_what_the_table_has_of_it() -> None:
    assert re.findall(r"(\w+)=", repr(RECORD)) == [COLUMNS[0], "config", *COLUMNS[1:]]


def test_a_key_that_nothing_reads_may_have_a_slash() -> None:
    unread = replace(RECORD, config={"lr": 0.1, "a/key": 1, "net": {"b": 2, "c": 3}}, unread=("a/key", "net.b"))
    assert unread.used == {"lr": 0.1, "net/c": 3}


def test_metrics_are_those_of_the_model_that_is_kept() -> None:
    trained = (("sweep", 1, 0.9), ("sweep", 2, 0.8), ("race", 1, 0.6), ("race", 2, 0.4), ("race", 3, 0.5))
    lines = tuple({"heat": heat, "epoch": epoch, "val_loss": loss} for heat, epoch, loss in trained)
    record = replace(RECORD, history=lines, sweep_epochs=2, epochs=3, kept_epoch=2)
    assert record.metrics == {"val_loss": 0.4}
    assert replace(record, history=lines[:2], epochs=0, kept_epoch=0).metrics == {"val_loss": 0.8}


def test_what_workers_report_of_themselves_is_no_metric() -> None:
    assert ("heat", "epoch", *HISTORY) == NO_METRICS
    line = dict.fromkeys(HISTORY, 2.0) | {"heat": "sweep", "epoch": 1, "reward": 3.0, "val_loss": None}
    metrics = replace(RECORD, history=(line,)).metrics
    assert metrics.keys() == {"reward", "val_loss"}
    assert metrics["reward"] == 3.0
