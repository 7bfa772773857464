"""Callbacks that log a run to other tools, on any backend: `tune(callbacks=[TensorBoardLogger("tb")])`.

Each logger writes a trial's configuration, and after each epoch its metrics, as "sweep/val_loss" and "race/val_loss". A
resumed run appends only the values that an earlier process has not logged. Each logger needs the package of its tool.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import math
import re
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydro_rasda.common.argument_checks import check_path, require
from hydro_rasda.common.optional_packages import needed_by
from hydro_rasda.history.lines import number_of
from hydro_rasda.records.records import flat
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
from hydro_rasda.run.files import append_to, open_to_read, refuse_links, truncate
from hydro_rasda.run.run_json import unique_name

__all__ = ["CSVLogger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]


@dataclass
class Logged:
    """The values of a trial that are known so far.

    Attributes:
        config: The configuration, flattened.
        epochs: Maps each heat to its last epoch.
        metrics: Maps each metric of a heat, such as "sweep/val_loss", to its last value.
    """

    number: int
    config: dict[str, Any] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Number of epochs trained, over all heats; it only grows."""
        return sum(self.epochs.values())


class TrialLogger:
    """Base of loggers. It follows each trial from its first new epoch until the trial stops or fails, or the run ends.

    Events that an earlier process of the run logged are not logged again. If a closed trial continues, it is opened
    again.
    """

    def __init__(self) -> None:
        self._trials: dict[int, Logged] = {}
        self._open: set[int] = set()
        self._closed: set[int] = set()

    def begin(self, event: RunBegan) -> None:
        """Prepare for a run that begins or is resumed."""

    def logged(self, trial: int, heat: str) -> float:
        """Return the last epoch of a trial in a heat that an earlier process logged.

        The base class returns infinity: then no epoch of an earlier process is logged again.
        """
        return math.inf

    def open(self, trial: Logged) -> None:
        """Prepare to log a trial, before its first `log` or `close`. A closed trial that continues is opened again."""

    def log(self, trial: Logged, heat: str, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Log an epoch of a trial in the heat "sweep", "middle" or "race".

        Metrics that are not finite are NaN.
        """
        raise NotImplementedError

    def close(self, trial: Logged, status: str) -> None:
        """Close a trial that is "stopped", "failed", "finished" or "interrupted". It probably has no more epochs."""

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunBegan):
            self._trials, self._open, self._closed = {}, set(), set()
            self.begin(event)
        elif isinstance(event, TrialConfigured):
            self._trials.setdefault(event.trial, Logged(event.trial)).config = flat(event.config)
        elif isinstance(event, EpochEnded):
            self._take_in(event)
        elif isinstance(event, RunEnded):
            for number in sorted(self._open if event.error else self._trials):
                self._close(number, "interrupted" if event.error else "finished")
        elif isinstance(event, (RungDecided, FinalistsChosen)):
            for number in sorted({*event.candidates} - {*event.kept}):
                self._close(number, "stopped", event.recalled)
        elif isinstance(event, TrialEnded):
            self._close(event.trial, "stopped", event.recalled)
        elif isinstance(event, TrialFailed):
            self._close(event.trial, "failed", event.recalled)

    def _take_in(self, event: EpochEnded) -> None:
        trial, heat = self._trials.setdefault(event.trial, Logged(event.trial)), event.heat
        metrics = {name: number_of(value) for name, value in event.metrics.items()}
        trial.epochs[heat] = event.epoch
        trial.metrics |= {f"{heat}/{name}": value for name, value in metrics.items()}
        self._closed.discard(event.trial)
        if event.recalled and event.epoch <= self.logged(event.trial, heat):
            return
        if event.trial not in self._open:
            self.open(trial)
            self._open.add(event.trial)
        self.log(trial, heat, event.epoch, metrics, event.seconds)

    def _close(self, number: int, status: str, recalled: bool = False) -> None:
        """Close a trial unless it is closed already. `recalled` is True if an earlier process recorded its end."""
        trial = self._trials.get(number)
        if trial is None or not trial.epochs or number in self._closed:
            return
        self._closed.add(number)
        if number not in self._open:
            if recalled:
                return
            self.open(trial)
        self._open.discard(number)
        self.close(trial, status)


def plain(value: Any) -> bool | int | float | str:
    """Return a value of a configuration in a form that every logger can store."""
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63):  # the integers of NumPy
        return value
    text: str = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    return text.encode(errors="backslashreplace").decode()  # the name of a file may hold bytes that are not UTF-8


COLUMNS = ("run", "trial", "heat", "epoch", "seconds", "metric", "value")


class CSVLogger(TrialLogger):
    """Appends a row to a CSV file for each metric of each epoch of a trial, as in `TuneResult.curves`.

    Columns: `run` (a name that no other run has), `trial`, `heat` ("sweep", "middle" or "race"),
    `epoch`, `seconds` (wall time of the run), `metric`, and `value`. A value that is not finite is left empty.

    Args:
        path: The file; None for `metrics.csv` in the run's folder.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        if path is not None:
            check_path("path", path)
        self._asked, self._path, self._run = path, Path(), ""
        self._logged: dict[tuple[int, str], int] = {}

    def begin(self, event: RunBegan) -> None:
        self._path = event.path / "metrics.csv" if self._asked is None else Path(self._asked).expanduser()
        if self._asked is not None:  # `append_to` would refuse a link
            self._path = self._path.resolve()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._run, self._logged = unique_name(event.path), {}
        content = b""
        with contextlib.suppress(FileNotFoundError), open_to_read(self._path) as file:
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        rows = csv.DictReader(io.StringIO((whole or content).decode(), newline=""))
        rule = f"a file with the columns {', '.join(COLUMNS)}, or none yet"
        require(not content or tuple(rows.fieldnames or ()) == COLUMNS, "path", str(self._path), rule)
        if len(whole) < len(content):  # the last row is incomplete, for example after the disk was full
            truncate(self._path, len(whole))
        if not whole:
            self._append([COLUMNS])
        for row in rows:
            # All rows of a file in the run's folder are this run's, even if the folder had another name before.
            if self._asked is None or row["run"] == self._run:
                place = int(row["trial"]), row["heat"]
                self._logged[place] = max(int(row["epoch"]), self._logged.get(place, 0))

    def logged(self, trial: int, heat: str) -> float:
        return self._logged.get((trial, heat), 0)

    def log(self, trial: Logged, heat: str, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        told = [(name, value if math.isfinite(value) else "") for name, value in metrics.items()]
        self._append([(self._run, trial.number, heat, epoch, round(seconds, 3), *each) for each in told])

    def _append(self, rows: Sequence[Sequence[object]]) -> None:
        with io.TextIOWrapper(append_to(self._path), encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)


_STATUS = {"stopped": "FINISHED", "finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MLflowLogger(TrialLogger):
    """Logs each trial as an MLflow run: its parameters, its metrics by epoch, and how it ended.

    Args:
        experiment: Name of the experiment, which is created if it is missing; None for the run's name.
        tracking_uri: Address of the server; None for MLflow's own setting (`MLFLOW_TRACKING_URI`).

    Raises:
        ImportError: If MLflow is not installed.
    """

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        super().__init__()
        self._asked, self._uri = experiment, tracking_uri
        self._experiment, self._run = "", ""
        self._ids: dict[int, str] = {}
        self._logged: dict[int, dict[str, float]] = {}
        with needed_by("MLflowLogger", "mlflow"):
            self._mlflow = importlib.import_module("mlflow")
        self._client: Any = None

    def begin(self, event: RunBegan) -> None:
        self._run = unique_name(event.path)
        client = self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        name = self._asked or event.path.name
        known = client.get_experiment_by_name(name)
        self._experiment = client.create_experiment(name) if known is None else known.experiment_id
        # Continue the MLflow runs of an earlier process of this run. Search by the end of its name, because MLflow's
        # filters have no escapes for quotes and backslashes in the rest.
        found = client.search_runs([self._experiment], f"tags.hydro_rasda LIKE '%{self._run[-9:]}'", max_results=50_000)
        runs = [run for run in found if run.data.tags["hydro_rasda"] == self._run]
        self._ids = {int(run.data.tags["trial"]): run.info.run_id for run in runs}
        self._logged = {int(run.data.tags["trial"]): dict(run.data.metrics) for run in runs}

    def logged(self, trial: int, heat: str) -> float:
        return self._logged.get(trial, {}).get(f"{heat}/epoch", 0)

    def open(self, trial: Logged) -> None:
        if (known := self._ids.get(trial.number)) is not None:
            self._client.update_run(known, status="RUNNING")
            return
        tags = {"hydro_rasda": self._run, "trial": str(trial.number), "mlflow.runName": f"trial {trial.number}"}
        run = self._client.create_run(self._experiment, tags=tags)
        self._ids[trial.number] = run.info.run_id
        entities = self._mlflow.entities
        names = _mlflow_names(trial.config)
        params = [entities.Param(names[name], str(plain(value))) for name, value in trial.config.items()]
        self._client.log_batch(run.info.run_id, params=params)

    def log(self, trial: Logged, heat: str, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        now, entities = int(time.time() * 1000), self._mlflow.entities
        values = {f"{heat}/{name}": value for name, value in metrics.items() if math.isfinite(value)}
        values[f"{heat}/epoch"] = epoch  # `begin` of a resumed run reads from it which epochs are logged
        names = _mlflow_names(f"{heat}/{name}" for name in [*metrics, "epoch"])
        logged = [entities.Metric(names[name], value, now, epoch) for name, value in values.items()]
        self._client.log_batch(self._ids[trial.number], metrics=logged)

    def close(self, trial: Logged, status: str) -> None:
        self._client.set_tag(self._ids[trial.number], "status", status)
        self._client.set_terminated(self._ids[trial.number], _STATUS[status])


def _mlflow_names(names: Iterable[str]) -> dict[str, str]:
    """Map names to names that MLflow accepts. It refuses other characters, such as the one in "val_recall@10".

    If several names would become the same, those that change get a digest.
    """
    taken = {name: re.sub(r"[^/\w.\- :]", "_", name) for name in names}
    counts = Counter(taken.values())
    for name, new in taken.items():
        if new != name and counts[new] > 1:
            taken[name] = f"{new}_{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
    return taken


class TensorBoardLogger(TrialLogger):
    """Writes event files, in one folder for each trial: scalars by epoch, and HParams when a trial ends.

    Args:
        folder: Folder for `tensorboard --logdir FOLDER`, in which each run gets a folder; None for `tensorboard` in the
            run's folder.

    Raises:
        ImportError: If tensorboardX is not installed. It comes with Ray Tune.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        if folder is not None:
            check_path("folder", folder)
        self._asked, self._folder, self._inside = folder, Path(), 0
        self._files: dict[int, EventFile] = {}
        self._logged: dict[int, dict[str, int]] = {}
        with needed_by("TensorBoardLogger", "tensorboard"):
            self._summary = importlib.import_module("tensorboardX").summary

    def begin(self, event: RunBegan) -> None:
        self._files, self._logged = {}, {}
        if self._asked is None:
            self._folder, self._inside = event.path / "tensorboard", 2
            refuse_links(self._folder, *self._folder.glob("*"))
        else:
            self._folder, self._inside = Path(self._asked).expanduser() / unique_name(event.path), 0

    def logged(self, trial: int, heat: str) -> float:
        if trial not in self._logged:
            self._logged[trial] = last_steps(self._folder / f"trial-{trial}", self._inside)
        begins = tag_of(f"{heat}/")
        return max((step for tag, step in self._logged[trial].items() if tag.startswith(begins)), default=0)

    def open(self, trial: Logged) -> None:
        if trial.number not in self._files:
            self._files[trial.number] = EventFile(self._folder / f"trial-{trial.number}", self._inside)

    def log(self, trial: Logged, heat: str, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        values = {f"{heat}/{name}": value for name, value in metrics.items()}
        self._files[trial.number].append([scalars(values)], epoch)

    def close(self, trial: Logged, status: str) -> None:
        config = {name: plain(value) for name, value in trial.config.items()} | {"status": status}
        metrics = {tag_of(name): value for name, value in trial.metrics.items() if math.isfinite(value)}
        self._files[trial.number].append(self._summary.hparams(config, metrics))


class WandbLogger(TrialLogger):
    """Logs each trial as a W&B run, grouped by the name of the run. A resumed run continues the same W&B runs.

    Args:
        project: The W&B project.
        group: The W&B group; None for the run's name.
        settings: More arguments of `wandb.init`, such as `mode="offline"`, `entity` or `tags`.

    Raises:
        ImportError: If wandb is not installed.
    """

    def __init__(self, project: str, group: str | None = None, **settings: Any) -> None:
        super().__init__()
        self._project, self._group, self._settings = project, group, settings
        self._name = self._id = ""
        self._runs: dict[int, Any] = {}
        with needed_by("WandbLogger", "wandb"):
            self._wandb = importlib.import_module("wandb")

    def begin(self, event: RunBegan) -> None:
        self._name = event.path.name
        self._id = re.sub(r"[^A-Za-z0-9_-]", "-", unique_name(event.path))

    def open(self, trial: Logged) -> None:
        self._runs[trial.number] = self._wandb.init(
            **{
                "project": self._project,
                "group": self._group or self._name,
                "name": f"trial {trial.number}",
                "id": f"{self._id}-{trial.number}",
                "config": {name: plain(value) for name, value in trial.config.items()},
                "resume": "allow",
                "reinit": "create_new",  # several trials train at once, each with its own W&B run
                **self._settings,
            }
        )

    def log(self, trial: Logged, heat: str, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        values = {f"{heat}/{name}": value for name, value in metrics.items()}
        self._runs[trial.number].log({**values, f"{heat}/epoch": epoch}, step=trial.step)

    def close(self, trial: Logged, status: str) -> None:
        run = self._runs.pop(trial.number)
        run.summary["status"] = status
        run.finish(exit_code=int(status == "failed"))


_HEAD, _TAIL = 12, 4
"""Number of bytes in a TensorBoard record before its event, and after its event."""


class EventFile:
    """A TensorBoard file to which this process appends events. Its name sorts after those of earlier processes.

    Events are written at once, so that a killed process loses none. The writer of tensorboardX would delay them by two
    minutes, and would need a thread, a pipe and an open file for each trial that trains.

    Args:
        folder: The folder of the file, which TensorBoard shows as a run. It is created with the first event.
        inside: Number of names at the end of the folder's path that lie in the run's folder, and so must not be links.
    """

    def __init__(self, folder: Path, inside: int = 0) -> None:
        self._path, self._inside = folder / f"events.out.tfevents.{time.time():.6f}.hydro_rasda", inside + 1

    def append(self, summaries: Sequence[Any], step: int = 0) -> None:
        """Append one event for each `Summary` message, all in one write."""
        from tensorboardX.proto.event_pb2 import Event

        self._path.parent.mkdir(parents=True, exist_ok=True)
        now = time.time()
        with append_to(self._path, self._inside) as file:
            first = [] if file.tell() else [Event(wall_time=now, file_version="brain.Event:2")]
            events = [*first, *(Event(wall_time=now, step=step, summary=each) for each in summaries)]
            file.write(b"".join(map(_record, events)))


def tag_of(name: str) -> str:
    """Return the tag of a metric. TensorBoard's tags have no spaces."""
    return name.replace(" ", "_")


def scalars(values: Mapping[str, float]) -> Any:
    """Return TensorBoard's `Summary` message for the values of metrics by name."""
    from tensorboardX.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag_of(name), simple_value=value) for name, value in values.items()])


def last_steps(folder: Path, inside: int = 0) -> dict[str, int]:
    """Return the last step of each tag in a folder's event files. A record that was cut off does not count."""
    found: dict[str, int] = {}
    for path in folder.glob("*.tfevents.*"):
        for event in _events(path, inside + 1):
            for value in event.summary.value:
                found[value.tag] = max(event.step, found.get(value.tag, 0))
    return found


def _record(event: Any) -> bytes:
    """Return the bytes of a record: the length of an event, then the event, each followed by its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    content = event.SerializeToString()
    parts = struct.pack("<Q", len(content)), content
    return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in parts)


def _events(path: Path, inside: int) -> Iterator[Any]:
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    with open_to_read(path, inside) as file:
        content = file.read()
    at = 0
    while at + _HEAD <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + _HEAD + length
        if end + _TAIL > len(content):
            return
        try:
            yield Event.FromString(content[at + _HEAD : end])
        except DecodeError:
            return
        at = end + _TAIL
