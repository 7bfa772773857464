"""A run for MLflow: an experiment, with a run of MLflow's for each trial."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from hydro_rasda.loggers.trials import Logged, TrialLogger, needed, plain
from hydro_rasda.run.events import RunBegan

_STATUS = {"stopped": "FINISHED", "finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MLflowLogger(TrialLogger):
    """Logs each trial as a run of MLflow's: its parameters, its metrics by epoch, and how it ended.

    Args:
        experiment: Name of the experiment, which is made where it is not there; None for the run's name.
        tracking_uri: Address of the server; None for MLflow's own setting (`MLFLOW_TRACKING_URI`).

    Raises:
        ImportError: if MLflow is not there.
    """

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        super().__init__()
        self._asked, self._uri = experiment, tracking_uri
        self._experiment, self._run = "", ""
        self._ids: dict[int, str] = {}
        self._logged: dict[int, dict[str, float]] = {}
        self._mlflow = needed("mlflow", "MLflowLogger", "mlflow")
        self._client: Any = None

    def begin(self, event: RunBegan) -> None:
        self._run = str(event.path)
        client = self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        name = self._asked or event.path.name
        known = client.get_experiment_by_name(name)
        self._experiment = client.create_experiment(name) if known is None else known.experiment_id
        # What an earlier process of this run logged goes on.
        own = f"tags.hydro_rasda = '{self._run}'"
        runs = client.search_runs([self._experiment], own, max_results=50_000)
        self._ids = {int(run.data.tags["trial"]): run.info.run_id for run in runs}
        self._logged = {int(run.data.tags["trial"]): dict(run.data.metrics) for run in runs}

    def logged(self, trial: int, stage: str) -> float:
        return self._logged.get(trial, {}).get(f"{stage}/epoch", 0)

    def open(self, trial: Logged) -> None:
        if (known := self._ids.get(trial.number)) is not None:
            self._client.update_run(known, status="RUNNING")
            return
        tags = {"hydro_rasda": self._run, "trial": str(trial.number), "mlflow.runName": f"trial {trial.number}"}
        run = self._client.create_run(self._experiment, tags=tags)
        self._ids[trial.number] = run.info.run_id
        entities = self._mlflow.entities
        params = [entities.Param(name, str(plain(value))) for name, value in trial.config.items()]
        self._client.log_batch(run.info.run_id, params=params)

    def log(self, trial: Logged, stage: str, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        now, entities = int(time.time() * 1000), self._mlflow.entities
        values = {f"{stage}/{name}": value for name, value in metrics.items() if math.isfinite(value)}
        values[f"{stage}/epoch"] = epoch  # by which a run that goes on knows what is here
        logged = [entities.Metric(name, value, now, epoch) for name, value in values.items()]
        self._client.log_batch(self._ids[trial.number], metrics=logged)

    def close(self, trial: Logged, status: str) -> None:
        self._client.set_tag(self._ids[trial.number], "status", status)
        self._client.set_terminated(self._ids[trial.number], _STATUS[status])
