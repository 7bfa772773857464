"""A run for Weights & Biases: a group, with a run of W&B's for each trial."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from hydro_rasda.loggers.trials import Logged, TrialLogger, needed, plain
from hydro_rasda.run.events import RunBegan


class WandbLogger(TrialLogger):
    """Logs each trial as a run of W&B's, grouped by the name of the run; its id is the same when the run goes on.

    Args:
        project: W&B's.
        group: None for the run's name.
        settings: More arguments of `wandb.init`, such as `mode="offline"`, `entity` or `tags`.

    Raises:
        ImportError: if wandb is not there.
    """

    def __init__(self, project: str, group: str | None = None, **settings: Any) -> None:
        super().__init__()
        self._project, self._group, self._settings = project, group, settings
        self._name = self._id = ""
        self._runs: dict[int, Any] = {}
        self._wandb = needed("wandb", "WandbLogger", "wandb")

    def begin(self, event: RunBegan) -> None:
        self._name = event.path.name
        # Runs of one name in two folders are two.
        where = hashlib.sha256(str(event.path).encode()).hexdigest()[:8]
        self._id = f"{re.sub(r'[^A-Za-z0-9_-]', '-', self._name)}-{where}"

    def open(self, trial: Logged) -> None:
        self._runs[trial.number] = self._wandb.init(
            **{
                "project": self._project,
                "group": self._group or self._name,
                "name": f"trial {trial.number}",
                "id": f"{self._id}-{trial.number}",
                "config": {name: plain(value) for name, value in trial.config.items()},
                "resume": "allow",
                "reinit": "create_new",  # several trials train at the same time
                **self._settings,
            }
        )

    def log(self, trial: Logged, stage: str, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        values = {f"{stage}/{name}": value for name, value in metrics.items()}
        self._runs[trial.number].log({**values, f"{stage}/epoch": epoch}, step=trial.step)

    def close(self, trial: Logged, status: str) -> None:
        run = self._runs.pop(trial.number)
        run.summary["status"] = status
        run.finish(exit_code=int(status == "failed"))
