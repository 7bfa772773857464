"""A stand-in for Ray Tune's controller, which runs a scheduler at the speed of the scheduler itself."""

from __future__ import annotations

from collections import deque
from functools import cache
from types import SimpleNamespace
from typing import Any


class StandInController:
    """Calls a scheduler as Ray Tune's controller does, but trains nothing. Trials report in turn."""

    def __init__(self, rule: Any, scores: list[list[float]], folder: str) -> None:
        self._rule, self._scores, self._folder = rule, scores, folder
        self.trials: list[Any] = []
        self._live: dict[str, Any] = {}
        self._running: deque[Any] = deque()
        self._staged_trials: set[Any] = set()
        self._reuse_actors = False
        self._actor_manager = SimpleNamespace(_resource_manager=None, num_pending_actors=0, num_live_actors=0)
        self.search_alg = SimpleNamespace(on_trial_result=lambda trial_id, result: None)

    def get_live_trials(self) -> list[Any]:
        """Return all trials that are not over."""
        return list(self._live.values())

    def update_max_pending_trials(self, limit: int) -> None:
        """Ask for new trials only if the scheduler lets Ray do so."""
        self._wants_more = limit > 0

    def run(self) -> None:
        """Run all trials to their ends."""
        self._add()
        while self._live:
            while (chosen := self._rule.choose_trial_to_run(self)) is not None or self._wanted():
                if chosen is None:
                    self._add()
                else:
                    chosen.status = "RUNNING"
                    self._running.append(chosen)
            self._report(self._running.popleft())

    def _wanted(self) -> bool:
        return self._wants_more and len(self.trials) < len(self._scores)

    def _add(self) -> None:
        trial = stand_in_trial(len(self.trials), self._folder)
        self.trials.append(trial)
        self._live[trial.trial_id] = trial
        self._rule.on_trial_add(self, trial)

    def _report(self, trial: Any) -> None:
        t = trial.last_result.get("training_iteration", 0) + 1
        trial.last_result = {"training_iteration": t, "loss": self._scores[trial.number][t - 1]}
        result = {**trial.last_result, "should_checkpoint": True}
        decision = self._rule.on_trial_result(self, trial, result)
        if decision == "CONTINUE":
            self._running.append(trial)
        elif decision == "PAUSE":
            trial.status = "PAUSED"
            trial.latest_checkpoint_result = SimpleNamespace(metrics=trial.last_result)
        else:
            self._rule.on_trial_complete(self, trial, result)
            trial.status = "TERMINATED"
            del self._live[trial.trial_id]


def stand_in_trial(number: int, folder: str) -> Any:
    """Make a stand-in for one of Ray Tune's trials, with the parts that a scheduler sees."""
    from pyarrow.fs import LocalFileSystem
    from ray.tune.trainable import FunctionTrainable

    trial = SimpleNamespace(number=number, trial_id=f"{number:05d}", status="PENDING", last_result={})
    trial.latest_checkpoint_result = None
    trial.trainable_name, trial.config, trial.checkpoint, trial.local_path = "stand_in", {}, None, folder
    trial.storage = SimpleNamespace(storage_filesystem=LocalFileSystem(), experiment_fs_path=folder)
    trial.is_finished = lambda: trial.status == "TERMINATED"
    trial.init_local_path = lambda: None
    trial.get_trainable_cls = lambda: FunctionTrainable
    trial.placement_group_factory = _one_cpu()
    trial.update_resources = lambda factory: setattr(trial, "placement_group_factory", factory)
    return trial


@cache
def _one_cpu() -> Any:
    """Return one object for all trials. Ray makes one for each trial, which takes time that does not count here."""
    from ray.tune import PlacementGroupFactory

    return PlacementGroupFactory([{"CPU": 1.0}])
