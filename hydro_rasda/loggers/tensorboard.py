"""A run for TensorBoard: curves of each trial, and the table of hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydro_rasda.loggers.trials import Logged, TrialLogger, needed, plain
from hydro_rasda.run.events import RunBegan
from hydro_rasda.run.files import refuse_links


class TensorBoardLogger(TrialLogger):
    """Writes event files, one folder a trial: scalars by epoch, and HParams once a trial ends.

    Args:
        folder: Folder of the files, for `tensorboard --logdir FOLDER`. None for `tensorboard` in the run's folder.

    Raises:
        ImportError: if tensorboardX is not there, which Ray Tune brings along.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self._writers: dict[int, Any] = {}
        self._asked = folder
        self._folder = Path()
        self._there: set[str] = set()
        self._module = needed("tensorboardX", "TensorBoardLogger", "tensorboard")

    def begin(self, event: RunBegan) -> None:
        self._folder = event.path / "tensorboard" if self._asked is None else Path(self._asked).expanduser()
        if self._asked is None:
            refuse_links(self._folder, *self._folder.glob("*"))
        self._there = {path.name for path in self._folder.glob("trial-*")}

    def logged(self, trial: int, stage: str) -> float:
        # What an earlier process wrote is not read again; of a trial without a folder, that is nothing.
        return math.inf if f"trial-{trial}" in self._there else 0

    def open(self, trial: Logged) -> None:
        folder = self._folder / f"trial-{trial.number}"
        self._writers[trial.number] = self._module.SummaryWriter(str(folder), write_to_disk=True)

    def log(self, trial: Logged, stage: str, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        for name, value in metrics.items():
            # TensorBoard's tags have no spaces.
            self._writers[trial.number].add_scalar(_tag(f"{stage}/{name}"), value, epoch)

    def close(self, trial: Logged, status: str) -> None:
        writer = self._writers.pop(trial.number)
        summary = needed("tensorboardX.summary", "TensorBoardLogger", "tensorboard")
        config = {name: plain(value) for name, value in trial.config.items()} | {"status": status}
        metrics = {_tag(name): value for name, value in trial.metrics.items() if math.isfinite(value)}
        for each in summary.hparams(config, metrics):
            writer.file_writer.add_summary(each)
        writer.close()


def _tag(name: str) -> str:
    return name.replace(" ", "_")
