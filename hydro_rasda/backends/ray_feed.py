"""Between the main thread and the one that Ray Tune runs in: trials go one way, what becomes of them the other.

A :class:`Feed` gives Tune its trials. A :class:`Witness` writes what happens to an :class:`EventLog`, a file, before
Tune acts on it: what a killed process had not read yet, the next one reads.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.train._internal.session import _TrainingResult
from ray.tune import PlacementGroupFactory
from ray.tune.experiment import Experiment, Trial
from ray.tune.search.search_algorithm import SearchAlgorithm

from hydro_rasda.backends.full_size import EPOCH_SECONDS
from hydro_rasda.store import Line

HISTORY = ("workers", "global_batch_size", "lr_multiplier")
"""What a report says besides the metrics "train_*" and "val_*"."""


def folder_name(trial: Trial) -> str:
    """A trial's folder within the experiment's."""
    return f"trial-{trial.trial_id}"


@dataclass(frozen=True)
class Offer:
    """What is to be trained.

    Attributes:
        origin: The trial whose sampled configuration this one began as: itself, but where PBT changed that.
        config: Its configuration.
        start: Folder of the checkpoint to go on from, as a worker saves it; None to begin at the beginning.
        metrics: Tune's record of that checkpoint, its "training_iteration" among them.
    """

    origin: int
    config: Mapping[str, Any]
    start: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Feed(SearchAlgorithm):  # type: ignore[misc]
    """The trials that Tune gets, one by one, for as long as more may come.

    A trial's id is its number: a configuration that PBT overwrites does not say any more which trial it is.

    Args:
        experiment: What the trials belong to.
        resources: Of a new trial; None where the scheduler says.
    """

    def __init__(self, experiment: Experiment, resources: PlacementGroupFactory | None = None) -> None:
        self._spec = experiment.spec
        self._resources = resources
        self._waiting: dict[int, Offer] = {}
        self._given: set[int] = set()
        self._closed = False
        self._changed = threading.Condition()

    def offer(self, offers: Mapping[int, Offer]) -> None:
        """Have trials trained, best first; they go before those offered earlier that have not begun."""
        with self._changed:
            merged = {**offers, **{n: offer for n, offer in self._waiting.items() if n not in offers}}
            self._waiting = {n: offer for n, offer in merged.items() if n not in self._given}
            self._changed.notify_all()

    def close(self) -> None:
        """No more will be offered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Return when something is offered, or after so long."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(seconds)
                return
        time.sleep(seconds)

    def add_configurations(self, experiments: Any) -> None:
        """Nothing to do: trials are offered."""

    def next_trial(self) -> Trial | None:
        """The next of those offered; None while there is none."""
        with self._changed:
            if not self._waiting:
                return None
            number = next(iter(self._waiting))
            offer = self._waiting.pop(number)
            self._given.add(number)
        trial = Trial(
            self._spec["run"],
            config={"trial": offer.origin, "config": dict(offer.config)},
            trial_id=str(number),
            storage=self._spec["storage"],
            experiment_tag=str(number),
            placement_group_factory=self._resources,
            checkpoint_config=self._spec["checkpoint_config"],
            max_failures=self._spec["max_failures"],
            trial_dirname_creator=folder_name,
        )
        if offer.start is not None:
            checkpoint = tune.Checkpoint.from_directory(offer.start)
            trial.on_checkpoint(_TrainingResult(checkpoint, dict(offer.metrics)))
        return trial

    def is_finished(self) -> bool:
        """Whether no trial is left to be given, nor will be."""
        with self._changed:
            return self._closed and not self._waiting

    def set_finished(self) -> None:
        """Drop what was offered and has not begun."""
        with self._changed:
            self._waiting = {}
        self.close()


class EventLog:
    """Events of an experiment, one JSON line each, written by one thread and read by another.

    Args:
        path: Its file; one that is there is read from its beginning, and gone on with.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        whole = path.read_bytes().rfind(b"\n") + 1
        os.truncate(path, whole)  # a killed process may leave half a line
        self._path = path
        self._writer = open(path, "ab")  # noqa: SIM115 (closed in close)
        self._reader = open(path, "rb")  # noqa: SIM115 (closed in close)
        self._read = 0

    def write(self, event: Line) -> None:
        """Add an event."""
        self._writer.write(json.dumps(event, default=repr).encode() + b"\n")
        self._writer.flush()

    def read(self) -> Iterator[tuple[int, Line]]:
        """Events that were not read yet, each with its place in the file."""
        while True:
            before = self._reader.tell()
            raw = self._reader.readline()
            if not raw.endswith(b"\n"):
                self._reader.seek(before)
                return
            self._read += 1
            yield self._read - 1, json.loads(raw)

    def close(self) -> None:
        """Let go of the file."""
        self._writer.close()
        self._reader.close()

    def remove(self) -> None:
        """Remove the file: all of it is kept elsewhere."""
        self.close()
        self._path.unlink(missing_ok=True)


class Witness(tune.Callback):  # type: ignore[misc]
    """Writes down what becomes of the trials."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """An epoch is over."""
        metrics = {k: v for k, v in result.items() if k.startswith(("train_", "val_")) or k in HISTORY}
        seconds = result.get(EPOCH_SECONDS, result["time_this_iter_s"])
        self._write("metrics", trial, epoch=result["epoch"], metrics=metrics, seconds=seconds)

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: tune.Checkpoint, **info: Any
    ) -> None:
        """A checkpoint is in the experiment's folder."""
        # PBT overwrites a trial's configuration with another's, its number included.
        self._write("saved", trial, path=checkpoint.path, origin=trial.config["trial"], config=trial.config["config"])

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A trial failed, and goes on from its last checkpoint."""
        self._write("recovers", trial, error=_error(trial))

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A trial failed for good."""
        self._write("failed", trial, error=_error(trial))

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A trial is done, or was stopped."""
        self._write("ended", trial)

    def _write(self, event: str, trial: Trial, **more: Any) -> None:
        self._log.write({"event": event, "trial": number_of(trial), **more})


def number_of(trial: Trial) -> int:
    """Our number of one of Tune's trials."""
    return int(trial.trial_id)


def _error(trial: Trial) -> str:
    """What a trial's last failure said, without the frames of Ray's own code around it."""
    # Tune's own reader looks in the experiment's folder, where the file comes with the next snapshot.
    try:
        with open(trial.pickled_error_file, "rb") as file:
            error = cloudpickle.load(file)
    except (OSError, TypeError):
        return "it could not be started"
    return str(getattr(error, "cause", None) or error)
