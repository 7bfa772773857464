"""Epochs at full size are lines while they train: for people who follow the run, and for nothing that it decides."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import LocalBackend, RaceConfig, TuneResult
from hydro_rasda.contracts import Event
from hydro_rasda.history.lines import EpochTold, metric_lines
from hydro_rasda.loggers import CSVLogger
from hydro_rasda.problem.problem import Problem
from hydro_rasda.records.record_from_journal import read_record
from hydro_rasda.records.report import live_line, progress_of
from hydro_rasda.run import run_folder
from hydro_rasda.run.events import Callbacks, EpochEnded
from hydro_rasda.run.record_full_size import hear, record_epochs, record_failure, source_of
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from tests.hydro_rasda.forks import is_killed
from tests.hydro_rasda.training.test_user_loop import at_full_size
from tests.hydro_rasda.training.test_user_loop import train as train_own

Quick = Callable[..., TuneResult]

SPANS: dict[str, Any] = {"max_t": 6, "num_samples": 4, "race": RaceConfig(top_k=2, grace_period=4)}
"""Full-size models train to epoch 4 without a checkpoint."""


class Kills:
    """Kills the tuner's process once a full-size trial has ended an epoch, after so many other such epochs."""

    def __init__(self, epoch: int, after: int) -> None:
        self._epoch, self._left = epoch, after

    def on_event(self, event: Event) -> None:
        if isinstance(event, EpochEnded) and event.heat == "race" and not event.recalled:
            self._left -= 1
            if event.epoch == self._epoch and self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def keys(path: Path) -> list[str]:
    lines = map(json.loads, (path / "journal.jsonl").read_text().splitlines())
    return [line["key"] for line in lines if line["event"] == "unit"]


def rows(path: Path) -> list[tuple[str, ...]]:
    with (path / "metrics.csv").open() as file:
        return [(row["trial"], row["heat"], row["epoch"], row["metric"]) for row in csv.DictReader(file)]


HOW: dict[str, dict[str, Any]] = {
    "library": SPANS,
    "own loop": {**SPANS, **at_full_size(train_own)},
}


@pytest.mark.skipif(sys.platform != "linux", reason="processes that have computed are forked")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("how", HOW)
def test_killed_within_a_span_it_shows_its_epochs_and_ends_as_an_unbroken_run(
    quick: Quick, tmp_path: Path, how: str
) -> None:
    """It is killed twice, the second time in an epoch that it came to before."""
    arguments = HOW[how]
    whole, path = quick(**arguments, name="whole"), tmp_path / "run"
    assert is_killed(lambda: quick(**arguments, callbacks=[CSVLogger(), Kills(3, 0)]))
    known = keys(path)
    assert known[-3:] == [f"race/trial-{known[-1].split('-')[1][0]}/at-{epoch}" for epoch in (1, 2, 3)]
    record = read_record(path)
    (live,) = [trial for trial in record.trials if trial.live]
    assert [line["epoch"] for line in live.live] == [1, 2, 3]
    # A killed process left no checkpoint: nothing else counts these epochs.
    assert (live.status, live.epochs, live.reached) == ("undecided", 0, 3)
    assert (record.cost.race_epochs, record.ended) == (0, False)
    assert live_line(record).startswith(f"under way at full size: trial {live.trial} at epoch 3 of 6 (val_loss ")
    assert progress_of(record, 0.0).endswith(" %")
    assert is_killed(lambda: quick(**arguments, callbacks=[CSVLogger(), Kills(4, 0)]))
    result = quick(**arguments, callbacks=[CSVLogger()])
    assert (result.best_trial, result.best_metric) == (whole.best_trial, whole.best_metric)
    assert result.trials == whole.trials
    assert result.trials == read_record(path).trials
    assert not any(trial.live for trial in result.trials)
    assert {of: count for of, count in Counter(rows(path)).items() if count > 1} == {}
    assert {f"{key}/again" for key in known[-3:]} <= {*keys(path)}


@pytest.mark.parametrize(
    ("devices", "how"),
    [
        *(pytest.param(1, how, id=f"forks-{how}") for how in HOW),
        # A process of a pool takes seconds to start, and trains either way as a fork does.
        *(pytest.param(2, how, id=f"pool-{how}", marks=pytest.mark.slow) for how in HOW),
    ],
)
def test_each_epoch_is_a_line_before_its_checkpoint(quick: Quick, how: str, devices: int) -> None:
    """Also where other processes train, and no epoch has two lines."""
    result = quick(**HOW[how], backend=LocalBackend(["cpu"] * devices))
    known = [key for key in keys(result.path) if "/at-" in key or "/to-" in key]
    for trial in result.trials:
        own = [key.rpartition("/")[2] for key in known if key.startswith(f"race/trial-{trial.trial}/")]
        stops = [4] * (trial.epochs >= 4) + [6] * (trial.epochs == 6)
        assert own == [
            name
            for start, stop in zip([0, 4], stops, strict=False)
            for name in [*(f"at-{epoch}" for epoch in range(start + 1, stop + 1)), f"to-{stop}"]
        ]
    told = [tuple(line[name] for name in ("heat", "trial", "epoch")) for line in lines_of(result.path)]
    assert len(told) == len(set(told))


def lines_of(path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (path / "journal.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "metrics"]


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def run(problem: Problem, tmp_path: Path, events: list[Event]) -> Iterator[Run]:
    with Store.open(tmp_path / "run", {}, "auto") as store:
        yield Run(problem, store, Callbacks([events.append]))


def scores(**of_epochs: float) -> list[tuple[int, dict[str, float]]]:
    return [(int(epoch[1:]), {"train_loss": value, "val_loss": value}) for epoch, value in of_epochs.items()]


def tell(run: Run, number: int, **of_epochs: float) -> None:
    """Have the tuner hear of epochs of a full-size trial, all in one message."""
    told: list[EpochTold] = [(number, *each) for each in scores(**of_epochs)]
    hear(run, len(told), {"val_loss": [told[-1][2]["val_loss"]]}, told)


def ended(events: list[Event]) -> list[tuple[int, int, float]]:
    return [(e.trial, e.epoch, e.metrics["val_loss"]) for e in events if isinstance(e, EpochEnded)]


def test_epochs_that_are_trained_again_are_told_where_they_differ(run: Run, events: list[Event]) -> None:
    tell(run, 0, e1=0.5, e2=0.4, e3=0.3)
    tell(run, 0, e1=0.5)
    assert [line["epoch"] for line in run.history.live[0].trained()] == [1]
    tell(run, 0, e2=0.45)
    lines = metric_lines("race", 0, scores(e1=0.5, e2=0.45, e3=0.3, e4=0.2))
    record_epochs(run, 0, lines, {})
    assert run.history.curve("race", 0) == {1: 0.5, 2: 0.45, 3: 0.3, 4: 0.2}
    assert run.history.live == {}
    assert ended(events) == [(0, 1, 0.5), (0, 2, 0.4), (0, 3, 0.3), (0, 2, 0.45), (0, 4, 0.2)]
    assert [*run.store.units()] == [f"race/trial-0/{name}" for name in ("at-3", "at-1", "at-2", "to-4")]


def test_words_that_come_late_are_left_out(run: Run) -> None:
    """A cluster may pass them on once the trial has come further, or has failed."""
    record_epochs(run, 0, metric_lines("race", 0, scores(e1=0.5, e2=0.4)), {})
    tell(run, 1, e1=0.6)
    record_failure(run, 1, "ValueError: no")
    assert run.history.live == {}
    for number in (0, 1):
        tell(run, number, e2=0.4)
    assert run.history.live == {}
    assert [*run.store.units()][-1] == "race/trial-1/failed-after-0"


def test_a_checkpoint_may_be_lost_twice_at_one_epoch(problem: Problem, tmp_path: Path) -> None:
    key = "race/trial-0/to-1"
    for _ in range(2):
        with Store.open(tmp_path / "run", {}, "auto") as store:
            run = Run(problem, store)
            run.fold()
            record_epochs(run, 0, metric_lines("race", 0, scores(e1=0.5)), {})
            assert (source_of(run, 0), run.history.epochs("race", 0)) == (key, 1)
            store.file(key).write_bytes(b"")
        with Store.open(tmp_path / "run", {}, "must") as store:
            run = Run(problem, store)
            run.fold()
            assert (source_of(run, 0), run.history.epochs("race", 0)) == (None, 0)


def test_time_of_live_epochs_does_not_count_for_the_next_process(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They train again; what is shown meanwhile is the time at which they ended."""
    record_epochs(run, 0, metric_lines("race", 0, scores(e1=0.5)), {})
    before, now = run.history.seconds, time.monotonic()
    monkeypatch.setattr(run_folder, "monotonic", lambda: now + 1000)
    tell(run, 0, e2=0.4)
    assert run.history.now > 1000 > run.history.seconds == before
    run.store.close()
    with Store.open(tmp_path / "run", {}, "must") as store:
        assert store.seconds == pytest.approx(before)
        assert store.recorded == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="nothing that is always full")
def test_a_full_disk_is_no_fault_of_the_trial_that_trains(run: Run) -> None:
    """The next unit of work says it, and no line follows one that may be torn."""
    tell(run, 0, e1=0.5)
    journal = run.store._journal
    assert journal is not None
    file = os.dup(journal.fileno())
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal.fileno())
    tell(run, 0, e2=0.4)
    assert [*run.store.units()] == ["race/trial-0/at-1"]
    os.dup2(file, journal.fileno())
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            record_epochs(run, 0, metric_lines("race", 0, scores(e1=0.5, e2=0.4)), {})
    os.close(file)
    os.close(full)
