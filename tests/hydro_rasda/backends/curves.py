"""Trainables that import no torch, so that their actors start fast, and a callback that watches them."""

import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from ray import tune


def curve(config: dict[str, Any]) -> None:
    """A learning curve that depends on the configuration alone; time per iteration shrinks with the workers."""
    checkpoint, done = tune.get_checkpoint(), 0
    if checkpoint:
        with checkpoint.as_directory() as folder:
            done = json.loads(Path(folder, "done.json").read_text())
    workers = len(tune.get_context().get_trial_resources().bundles)
    for iteration in range(done + 1, config.get("iterations", 100) + 1):
        time.sleep(config.get("seconds", 0.0) / workers)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "done.json").write_text(json.dumps(iteration))
            saved = None if config.get("forgets") else tune.Checkpoint.from_directory(folder)
            tune.report({"loss": config["x"] + 1 / iteration, "workers": workers}, checkpoint=saved)


class Unresettable(tune.Trainable):  # type: ignore[misc]
    def step(self) -> dict[str, float]:
        return {"loss": 0.0}


class Watch(tune.Callback):  # type: ignore[misc]
    """How long trials were paused, in the driver's time, and how many new trials started meanwhile."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int, float]] = []
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.overtaken: list[int] = []
        self.used: list[int] = []
        self._idle: dict[str, tuple[float, int]] = {}
        self._new_starts = 0

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        self.reports.append((trial.trial_id, result["training_iteration"], result["loss"]))

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._new_starts += not trial.last_result

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        now = time.monotonic()
        running = [t for t in trials if t.status == "RUNNING"]
        self.used.append(sum(len(t.placement_group_factory.bundles) for t in running))
        for trial in running:
            if trial.trial_id in self._idle:
                since, new_starts = self._idle.pop(trial.trial_id)
                self.waits[trial.trial_id].append(now - since)
                self.overtaken.append(self._new_starts - new_starts)
        for trial in trials:
            if trial.status == "PAUSED":
                self._idle.setdefault(trial.trial_id, (now, self._new_starts))
