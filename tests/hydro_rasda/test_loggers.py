"""What loggers write of real runs, read back by the packages that it is for."""

from __future__ import annotations

import csv
import json
import math
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from hydro_rasda import RaceConfig, TuneResult
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.loggers import CSVLogger, Logged, MLflowLogger, TensorBoardLogger, TrialLogger, WandbLogger
from hydro_rasda.run.events import (
    EpochEnded,
    Event,
    FinalistsChosen,
    RunBegan,
    RunEnded,
    RungDecided,
    TrialConfigured,
    TrialEnded,
    TrialFailed,
)

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]
Values = dict[tuple[int, str, int], float]

SMALL: dict[str, Any] = {"num_samples": 4, "max_t": 3, "race": RaceConfig(top_k=2)}


def smooth(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)


def began(path: Path) -> RunBegan:
    return RunBegan(path=path, metric="val_loss", mode="min", settings={}, seconds=0.0)


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return [*csv.DictReader(opened)]


def values_of(rows: Iterable[Mapping[str, str]]) -> Values:
    """The finite values of rows of a CSV file, each of which is there once."""
    told = [row for row in rows if row["value"]]
    found = {
        (int(row["trial"]), f"{row['heat']}/{row['metric']}", int(row["epoch"])): float(row["value"]) for row in told
    }
    assert len(found) == len(told)
    return found


def curves(result: TuneResult) -> Values:
    """A run's metrics by trial, "heat/metric" and epoch; those that are finite."""
    frame = result.curves().dropna()
    keys = zip(frame["trial"], frame["heat"] + "/" + frame["metric"], frame["epoch"])
    return dict(zip(keys, frame["value"]))


@pytest.fixture
def stops() -> Callable[[int], Any]:
    """A callback that interrupts a run after so many epochs' metrics."""

    class Stops:
        def __init__(self, after: int) -> None:
            self.left = after

        def on_event(self, event: Any) -> None:
            if type(event).__name__ == "EpochEnded":
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt

    return Stops


def test_csv_has_each_epoch_once_also_where_the_run_was_interrupted(
    quick: Quick, tmp_path: Path, stops: Callable[[int], Any]
) -> None:
    file = tmp_path / "logs" / "metrics.csv"
    with pytest.raises(KeyboardInterrupt):
        quick(**SMALL, callbacks=[CSVLogger(file), stops(3)])
    result = quick(**SMALL, callbacks=[CSVLogger(file)])
    rows = rows_of(file)
    assert values_of(rows) == pytest.approx(curves(result))
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)


def test_runs_of_one_file_are_told_apart(quick: Quick, tmp_path: Path) -> None:
    """Also two of one name in two folders, and the one that began anew with another loss."""
    file, other = tmp_path / "m.csv", tmp_path / "other"
    found = [quick(**SMALL, callbacks=[CSVLogger(file)])]
    found += [quick(**SMALL, storage_path=other, seed=1, callbacks=[CSVLogger(file)])]
    changed: dict[str, Any] = {"loss_fn": smooth, "resume": "changed"}
    found += [quick(**SMALL, **changed, callbacks=[CSVLogger(file)])]
    quick(**SMALL, **changed, callbacks=[CSVLogger(file)])  # it has all of them already
    rows = rows_of(file)
    runs = dict.fromkeys(row["run"] for row in rows)
    assert [name.rpartition("-")[0] for name in runs] == ["run"] * 3
    for name, result in zip(runs, found, strict=True):
        assert values_of(row for row in rows if row["run"] == name) == pytest.approx(curves(result))


def test_logs_of_a_run_that_is_set_aside_stay_with_it(quick: Quick) -> None:
    first = quick(**SMALL, callbacks=[CSVLogger()])
    apart = first.path / "before-1"
    before = (first.path / "metrics.csv").read_bytes()
    again = quick(**SMALL, loss_fn=smooth, resume="changed", callbacks=[CSVLogger()])
    assert (apart / "metrics.csv").read_bytes() == before
    of_again = rows_of(again.path / "metrics.csv")
    rows = [(row["trial"], row["heat"], row["epoch"], row["metric"]) for row in of_again]
    assert len(rows) == len(set(rows)) == len(again.curves())
    quick(**SMALL, storage_path=first.path, name="before-1", callbacks=[CSVLogger()])
    assert (apart / "metrics.csv").read_bytes() == before


def test_csv_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("epoch,loss\n1,0.5\n")
    with pytest.raises(ValueError, match=r"`path` is '.*a\.csv', but must be a file with the columns run, trial"):
        CSVLogger(tmp_path / "a.csv").on_event(began(tmp_path))
    assert (tmp_path / "a.csv").read_text() == "epoch,loss\n1,0.5\n"


@pytest.mark.parametrize("left", [0, -4])
def test_csv_whose_last_row_or_first_was_cut_off_goes_on(tmp_path: Path, left: int) -> None:
    """As a full disk, or a kill before the first row, leaves it."""
    file = tmp_path / "metrics.csv"
    for recalled in (False, True):
        logger = CSVLogger()
        for event in (began(tmp_path), epoch(0, 1, recalled=recalled), epoch(0, 2, recalled=recalled)):
            logger.on_event(event)
        if not recalled:
            whole = file.read_bytes()
            file.write_bytes(whole[:left])
    assert file.read_bytes() == whole


def test_csv_in_the_runs_folder_by_default(quick: Quick) -> None:
    result = quick(**SMALL, callbacks=[CSVLogger()])
    assert (result.path / "metrics.csv").read_text().startswith("run,trial,heat,epoch,seconds,metric,value")


def test_tensorboard_reads_scalars_and_hyperparameters(quick: Quick, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    result = quick(**SMALL, callbacks=[TensorBoardLogger(tmp_path / "tb")])
    quick(**SMALL, name="another", seed=1, callbacks=[TensorBoardLogger(tmp_path / "tb")])
    (folder,) = (tmp_path / "tb").glob("run-*")
    assert len([*(tmp_path / "tb").iterdir()]) == 2
    found: Values = {}
    for trial in result.trials:
        events = accumulator.EventAccumulator(str(folder / f"trial-{trial.trial}")).Reload()
        for tag in events.Tags()["scalars"]:
            found |= {(trial.trial, tag, event.step): event.value for event in events.Scalars(tag)}
        content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        told = plugin.HParamsPluginData.FromString(content).session_start_info.hparams
        assert told["lr"].number_value == trial.config["lr"]
        assert told["optimizer"].string_value == trial.config["optimizer"]
        assert told["status"].string_value == trial.status
    assert found == pytest.approx(curves(result), rel=1e-6)


def test_tensorboard_has_each_epoch_once_also_where_the_run_was_killed(tmp_path: Path) -> None:
    """A killed process closes nothing. It had not logged an epoch of its journal, and another one not in full."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told = [replace(epoch(0, at), metrics={"val_loss": at / 4}) for at in (1, 2, 3, 4)]
    killed = TensorBoardLogger()
    for event in (began(tmp_path / "run"), *told[:3]):
        killed.on_event(event)
    (folder,) = (tmp_path / "run" / "tensorboard").iterdir()
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    logger = TensorBoardLogger()
    for event in (began(tmp_path / "run"), *(replace(each, recalled=True) for each in told[:3]), told[3]):
        logger.on_event(event)
    events = accumulator.EventAccumulator(str(folder)).Reload().Scalars("sweep/val_loss")
    assert [(event.step, event.value) for event in events] == [(at, at / 4) for at in (1, 2, 3, 4)]


def test_tensorboard_holds_no_file_or_thread_for_a_trial_that_trains(tmp_path: Path) -> None:
    logger, before = TensorBoardLogger(tmp_path), (len(os.listdir("/dev/fd")), threading.active_count())
    logger.on_event(began(tmp_path / "run"))
    for trial in range(20):
        logger.on_event(replace(epoch(trial, 1), metrics={"val_loss": 0.5}))
    assert (len(os.listdir("/dev/fd")), threading.active_count()) == before


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_a_run_for_each_trial_which_goes_on(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: Callable[[int], Any]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = (tmp_path / "mlruns").as_uri()
    with pytest.raises(KeyboardInterrupt):
        quick(**SMALL, callbacks=[MLflowLogger("digits", where), stops(3)])
    result = quick(**SMALL, callbacks=[MLflowLogger("digits", where)])
    client = mlflow.MlflowClient(tracking_uri=where)
    runs = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert sorted(int(run.data.tags["trial"]) for run in runs) == [0, 1, 2, 3]
    found: list[tuple[tuple[int, str, int], float]] = []
    for run in runs:
        number = int(run.data.tags["trial"])
        assert run.data.params == {name: str(value) for name, value in result.trials[number].config.items()}
        assert run.data.tags["status"] == result.trials[number].status
        assert run.info.status == "FINISHED"
        for name in run.data.metrics.keys() - {"sweep/epoch", "race/epoch"}:
            history = client.get_metric_history(run.info.run_id, name)
            found += [((number, name, each.step), each.value) for each in history]
    assert len(found) == len(dict(found))
    assert dict(found) == pytest.approx(curves(result))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_a_folder_with_an_apostrophe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLflowLogger("digits", (tmp_path / "mlruns").as_uri())
    logger.on_event(began(tmp_path / "o'neil" / "run"))
    assert logger.logged(0, "sweep") == 0


@pytest.fixture
def mlflow_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Logs a trial and its first epoch to MLflow, and returns what MLflow then holds of the trial."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = (tmp_path / "mlruns").as_uri()

    def logged(config: dict[str, Any], metrics: dict[str, float]) -> Any:
        logger = MLflowLogger("digits", where)
        logger.on_event(began(tmp_path / "run"))
        logger.on_event(TrialConfigured(seconds=1.0, trial=0, config=config))
        logger.on_event(replace(epoch(0, 1), metrics=metrics))
        client = mlflow.MlflowClient(tracking_uri=where)
        (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
        return run.data

    return logged


@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_names_with_characters_that_it_refuses(mlflow_holds: Callable[..., Any]) -> None:
    held = mlflow_holds({"lr": 0.1, "top@k": 5}, {"val_recall@10": 0.5})
    assert held.params == {"lr": "0.1", "top_k": "5"}
    assert held.metrics == {"sweep/val_recall_10": 0.5, "sweep/epoch": 1.0}


def written(file: Path) -> Iterator[bytes]:
    """The records of W&B's file, which is a log of LevelDB's: in blocks of 32 KiB, in parts where a block ends."""
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            yield parts


@pytest.fixture
def wandb_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield tmp_path / "wandb"
    wandb.teardown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_has_a_run_for_each_trial_offline(quick: Quick, wandb_folder: Path) -> None:
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    result = quick(**SMALL, callbacks=[WandbLogger("tests", mode="offline")])
    # The process that writes the files may still hold what it has not written.
    pytest.importorskip("wandb").teardown()
    found: Values = {}
    ids = []
    for file in sorted(wandb_folder.glob("offline-run-*/*.wandb")):
        number = -1
        for data in written(file):
            record = messages.Record.FromString(data)
            if record.run.run_id:
                ids.append(record.run.run_id)
                number = int(record.run.run_id.rpartition("-")[2])
                told = {each.key: json.loads(each.value_json) for each in record.run.config.update}
                assert told["lr"] == result.trials[number].config["lr"]
            values = {
                each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item
            }
            for name, value in values.items():
                heat, _, metric = name.rpartition("/")
                if metric.startswith(("train_", "val_")) and math.isfinite(value):
                    found[number, name, values[f"{heat}/epoch"]] = value
    assert sorted(each.rpartition("-")[2] for each in set(ids)) == ["0", "1", "2", "3"]
    assert found == pytest.approx(curves(result))


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (TensorBoardLogger, "tensorboardX", "tensorboard"),
        (MLflowLogger, "mlflow", "mlflow"),
        (lambda: WandbLogger("tests"), "wandb", "wandb"),
    ],
)
def test_what_is_not_there_is_said_before_the_run(
    make: Callable[[], Any], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {module}, which is not there: pip install 'hydro-rasda\[{extra}\]'"):
        make()


def told_by(events: list[Event], logger: TrialLogger) -> list[Any]:
    """The calls of a logger whose events are these."""
    calls: list[Any] = []
    for name in ("begin", "open", "log", "close"):
        setattr(logger, name, lambda *given, name=name: calls.append((name, *given)))
    for event in events:
        logger.on_event(event)
    return [
        (name, *(each.number if isinstance(each, Logged) else each for each in given))
        for name, *given in calls
        if name != "begin"
    ]


def epoch(trial: int, number: int, heat: HeatName = "sweep", recalled: bool = False) -> EpochEnded:
    return EpochEnded(seconds=2.0, trial=trial, heat=heat, epoch=number, metrics={"val_loss": None}, recalled=recalled)


def test_a_trial_is_open_from_its_first_epoch_until_it_is_over_for_whatever_reason() -> None:
    events = [
        *(TrialConfigured(seconds=0.0, trial=n, config={"lr": 0.1, "model": {"width": 8}}) for n in range(6)),
        *(epoch(n, 1) for n in range(5)),
        TrialFailed(seconds=1.0, trial=1, error="raised"),
        RungDecided(seconds=1.0, heat="sweep", epoch=1, candidates=(0, 2, 3, 4), kept=(0, 3, 4)),
        FinalistsChosen(seconds=1.0, candidates=(0, 3, 4), kept=(0, 4)),
        epoch(0, 1, "race"),
        epoch(4, 1, "race"),
        TrialEnded(seconds=1.0, trial=4, epoch=1),
    ]
    finished = [*events, RunEnded(seconds=1.0, error=None)]
    closed = [call for call in told_by(finished, TrialLogger()) if call[0] == "close"]
    assert closed == [
        ("close", 1, "failed"),
        ("close", 2, "stopped"),
        ("close", 3, "stopped"),
        ("close", 4, "stopped"),
        ("close", 0, "finished"),
    ]
    calls = told_by([*events, RunEnded(seconds=1.0, error="KeyboardInterrupt")], logger := TrialLogger())
    assert calls[-1] == ("close", 0, "interrupted")
    assert [call for call in calls if call[0] == "open"] == [("open", n) for n in range(5)]
    first = next(call for call in calls if call[0] == "log")
    assert first[:4] == ("log", 0, "sweep", 1)
    assert math.isnan(first[4]["val_loss"])
    assert first[5] == 2.0
    trial = logger._trials[0]
    assert trial.config == {"lr": 0.1, "model/width": 8}
    assert (trial.epochs, trial.step) == ({"sweep": 1, "race": 1}, 2)


def test_a_trial_that_was_interrupted_while_it_was_opened_is_not_closed() -> None:
    class Interrupted(TrialLogger):
        def open(self, trial: Logged) -> None:
            raise KeyboardInterrupt

    logger = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        logger.on_event(epoch(0, 1))
    logger.close = None  # type: ignore[method-assign, assignment]
    logger.on_event(RunEnded(seconds=1.0, error="KeyboardInterrupt"))


def test_who_was_stopped_stays_so_where_the_run_is_over(quick: Quick) -> None:
    closed: dict[int, str] = {}

    class Notes(TrialLogger):
        def close(self, trial: Logged, status: str) -> None:
            closed[trial.number] = status

    result = quick(**SMALL)
    assert "stopped" in {trial.status for trial in result.trials if trial.epochs}
    quick(**SMALL, callbacks=[Notes()])
    assert closed == {trial.trial: "finished" for trial in result.trials if trial.status == "finished"}


def test_what_is_recalled_is_logged_once() -> None:
    """Where nobody knows what an earlier process logged, all of it counts as logged."""
    events: list[Event] = [
        *(epoch(n, at, recalled=True) for n in (0, 1) for at in (1, 2)),
        TrialFailed(seconds=1.0, trial=1, error="raised", recalled=True),
        epoch(0, 3),
        RunEnded(seconds=1.0, error=None),
    ]
    calls = told_by(events, TrialLogger())
    assert [call[:4] for call in calls] == [("open", 0), ("log", 0, "sweep", 3), ("close", 0, "finished")]

    class KnowsOne(TrialLogger):
        def logged(self, trial: int, heat: str) -> float:
            return 1.0

    calls = told_by(events, KnowsOne())
    assert [call[:4] for call in calls] == [
        ("open", 0),
        ("log", 0, "sweep", 2),
        ("open", 1),
        ("log", 1, "sweep", 2),
        ("close", 1, "failed"),
        ("log", 0, "sweep", 3),
        ("close", 0, "finished"),
    ]


def test_wandb_is_asked_for_a_run_that_can_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Run:
        def __init__(self, **given: Any) -> None:
            self.given, self.summary, self.logged = given, dict[str, str](), list[Any]()
            runs.append(self)

        def log(self, values: Any, step: int) -> None:
            self.logged.append((values, step))

        def finish(self, exit_code: int) -> None:
            self.exit_code = exit_code

    runs: list[Run] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=Run))
    path = tmp_path / "a run"
    for group, name in ((None, "a run"), ("ours", "ours")):
        logger = WandbLogger("project", group, mode="offline")
        logger.begin(began(path))
        for number, status in ((0, "stopped"), (1, "failed")):
            trial = Logged(number, {"lr": 0.1, "act": max}, {"sweep": 2, "race": 1})
            logger.open(trial)
            logger.log(trial, "race", 1, {"val_loss": 0.5}, 1.0)
            logger.close(trial, status)
            run = runs.pop()
            assert run.given.pop("id").endswith(f"-{number}")
            assert run.given == {
                "project": "project",
                "group": name,
                "name": f"trial {number}",
                "config": {"lr": 0.1, "act": "max"},
                "resume": "allow",
                "reinit": "create_new",
                "mode": "offline",
            }
            assert run.logged == [({"race/val_loss": 0.5, "race/epoch": 1}, 3)]
            assert (run.summary, run.exit_code) == ({"status": status}, int(status == "failed"))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_tells_names_apart_that_it_would_take_for_one(mlflow_holds: Callable[..., Any]) -> None:
    held = mlflow_holds({"top@k": 5, "top_k": 6, "top#k": 7}, {"val_r@1": 0.25, "val_r_1": 0.5})
    assert held.params["top_k"] == "6"
    assert sorted(held.params.values()) == ["5", "6", "7"]
    assert held.metrics["sweep/val_r_1"] == 0.5
    assert sorted(held.metrics.values()) == [0.25, 0.5, 1.0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ['it\'s "a" run', "a\\b", "100%_", "ü" * 127])
def test_mlflow_goes_on_with_a_run_of_any_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for found in (0, 1):
        logger = MLflowLogger("digits", (tmp_path / "mlruns").as_uri())
        logger.on_event(began(tmp_path / name))
        assert logger.logged(0, "sweep") == found
        logger.on_event(epoch(0, 1))


@pytest.mark.parametrize("name", ["x" * 255, os.fsdecode(b"caf\xe9")])
def test_files_of_loggers_take_folders_of_any_name(tmp_path: Path, name: str) -> None:
    """The longest one that a file system takes, and one that is not UTF-8."""
    pytest.importorskip("tensorboardX")
    for logger in (TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "metrics.csv")):
        logger.on_event(began(tmp_path / name))
        logger.on_event(epoch(0, 1))
        logger.on_event(RunEnded(seconds=1.0))
    assert [*(tmp_path / "tb").glob("*/trial-0/*")]
    (row,) = rows_of(tmp_path / "metrics.csv")
    assert row["run"].startswith(name[:3])


def test_tensorboard_keeps_large_integers_and_odd_texts_as_texts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    logger = TensorBoardLogger(tmp_path)
    config = {"seed": 2**70, "size": 10**400, "file": os.fsdecode(b"caf\xe9")}
    for event in (began(tmp_path / "run"), TrialConfigured(seconds=1.0, trial=0, config=config), epoch(0, 1)):
        logger.on_event(event)
    logger.on_event(RunEnded(seconds=1.0))
    (file,) = tmp_path.glob("*/trial-0/*")
    assert all(text in file.read_bytes() for text in (b"%d" % 2**70, b"1" + 400 * b"0", rb"caf\udce9"))


@pytest.mark.parametrize(("make", "named"), [(CSVLogger, "path"), (TensorBoardLogger, "folder")])
def test_what_is_no_path_is_refused_before_the_run(make: Callable[[Any], TrialLogger], named: str) -> None:
    with pytest.raises(ValueError, match=f"`{named}` is 3, but must be a path"):
        make(3)
