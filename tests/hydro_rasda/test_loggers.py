"""What loggers write of real runs, read back by the packages that it is for."""

from __future__ import annotations

import csv
import json
import math
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import RaceConfig, TuneResult
from hydro_rasda.loggers import CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger
from hydro_rasda.run.events import RunBegan

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]
Values = dict[tuple[int, str, int], float]

SMALL: dict[str, Any] = {"num_samples": 4, "max_t": 3, "race": RaceConfig(top_k=2)}


def curves(result: TuneResult) -> Values:
    """A run's metrics by trial, "stage/metric" and epoch; those that are finite."""
    frame = result.curves().dropna()
    keys = zip(frame["trial"], frame["stage"] + "/" + frame["metric"], frame["epoch"])
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
    with file.open(newline="") as opened:
        rows = [*csv.DictReader(opened)]
    found = [
        ((int(row["trial"]), f"{row['stage']}/{row['metric']}", int(row["epoch"])), float(row["value"]))
        for row in rows
        if row["value"]
    ]
    assert len(found) == len(dict(found))
    assert dict(found) == pytest.approx(curves(result))
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)


def test_csv_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("epoch,loss\n1,0.5\n")
    with pytest.raises(ValueError, match=r"`path` is '.*a\.csv', but must be a file with the columns trial, stage"):
        CSVLogger(tmp_path / "a.csv").on_event(
            RunBegan(path=tmp_path, metric="a", mode="min", settings={}, seconds=0.0)
        )
    assert (tmp_path / "a.csv").read_text() == "epoch,loss\n1,0.5\n"


def test_csv_in_the_runs_folder_by_default(quick: Quick) -> None:
    result = quick(**SMALL, callbacks=[CSVLogger()])
    assert (result.path / "metrics.csv").read_text().startswith("trial,stage,epoch,seconds,metric,value")


def test_tensorboard_reads_scalars_and_hyperparameters(quick: Quick, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    result = quick(**SMALL, callbacks=[TensorBoardLogger(tmp_path / "tb")])
    found: Values = {}
    for trial in result.trials:
        events = accumulator.EventAccumulator(str(tmp_path / "tb" / f"trial-{trial.trial}")).Reload()
        for tag in events.Tags()["scalars"]:
            name = tag.replace("full_size", "full size")
            found |= {(trial.trial, name, event.step): event.value for event in events.Scalars(tag)}
        content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        told = plugin.HParamsPluginData.FromString(content).session_start_info.hparams
        assert told["lr"].number_value == trial.config["lr"]
        assert told["optimizer"].string_value == trial.config["optimizer"]
        assert told["status"].string_value == trial.status
    assert found == pytest.approx(curves(result), rel=1e-6)


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
        for name in run.data.metrics.keys() - {"sweep/epoch", "full size/epoch"}:
            history = client.get_metric_history(run.info.run_id, name)
            found += [((number, name, each.step), each.value) for each in history]
    assert len(found) == len(dict(found))
    assert dict(found) == pytest.approx(curves(result))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_a_folder_with_an_apostrophe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLflowLogger("digits", (tmp_path / "mlruns").as_uri())
    logger.on_event(RunBegan(path=tmp_path / "o'neil" / "run", metric="val_loss", mode="min", settings={}, seconds=0.0))
    assert logger.logged(0, "sweep") == 0


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
                stage, _, metric = name.rpartition("/")
                if metric.startswith(("train_", "val_")) and math.isfinite(value):
                    found[number, name, values[f"{stage}/epoch"]] = value
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
