"""What becomes of Ray Tune's trials, on its way from the thread that Tune runs in to the main thread.

An `EventLogger` writes what happens to an `EventLog`, a file, before Tune acts on it: what a killed process had not
read yet, the next one reads.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.tune.experiment import Trial

from hydro_rasda.backends.ray.trial_feed import number_of
from hydro_rasda.run.files import append_to, open_to_read
from hydro_rasda.run.journal import JournalLine
from hydro_rasda.training.measured import EPOCH_SECONDS, HISTORY


class EventLog:
    """Events of an experiment, one JSON line each, written by one thread and read by another.

    Args:
        path: Its file; one that is there is read from its beginning, and gone on with.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._writer = append_to(path, inside=2)
        self._reader = open_to_read(path, inside=2)
        self._writer.truncate(self._reader.read().rfind(b"\n") + 1)  # a killed process may leave half a line
        self._reader.seek(0)
        self._read = 0

    def write(self, event: JournalLine) -> None:
        """Add an event."""
        self._writer.write(json.dumps(event, default=repr).encode() + b"\n")
        self._writer.flush()

    def read(self) -> Iterator[tuple[int, JournalLine]]:
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


class EventLogger(tune.Callback):  # type: ignore[misc]
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


def _error(trial: Trial) -> str:
    """What a trial's last failure said, without the frames of Ray's own code around it."""
    # Tune's own reader looks in the experiment's folder, where the file comes with the next snapshot.
    try:
        with open(trial.pickled_error_file, "rb") as file:
            error = cloudpickle.load(file)
    except (OSError, TypeError):
        return "it could not be started"
    except (EOFError, pickle.UnpicklingError):
        free = shutil.disk_usage(trial.local_path).free // 2**20
        return f"what it failed of could not be written to {trial.local_path}, whose disk has {free} MiB left"
    return str(getattr(error, "cause", None) or error)
