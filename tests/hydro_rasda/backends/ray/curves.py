"""Trainables that import no torch, so that their actors start fast, and a callback that watches them."""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler
from ray import tune
from ray.tune.search import Searcher
from ray.util import placement_group, remove_placement_group


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


def lingering(config: dict[str, Any]) -> None:
    """As `curve`, but takes longer to end than Ray waits for before it gives the actor to another trial.

    The wait is set here, in the trial's own process: its parents may have been given another by `elastic`.
    """
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "0"
    try:
        curve(config)
    finally:
        time.sleep(2)


def held_up(config: dict[str, Any]) -> None:
    """As `curve` of `config["of"]`, but begins only once the file "until" is there, or dies then."""
    of = config["of"]
    while "until" in of and not Path(of["until"]).exists():
        time.sleep(0.05)
    if of.get("dies"):
        os._exit(1)
    curve(of)


class Unresettable(tune.Trainable):  # type: ignore[misc]
    def step(self) -> dict[str, float]:
        return {"loss": 0.0}


class Counter(tune.Trainable):  # type: ignore[misc]
    """A class trainable whose checkpoint is how far it came."""

    def setup(self, config: dict[str, Any]) -> None:
        self.done = 0

    def step(self) -> dict[str, float]:
        self.done += 1
        return {"loss": 1 / self.done}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "done.json").write_text(json.dumps(self.done))

    def load_checkpoint(self, checkpoint_dir: str | None) -> None:
        assert checkpoint_dir is not None
        self.done = json.loads(Path(checkpoint_dir, "done.json").read_text())


class Raises(Counter):
    """Cannot be made another trial's."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        raise RuntimeError("not today")


class Store(FSSpecHandler):  # type: ignore[misc]
    """A folder as pyarrow sees an object store through fsspec: nothing is appended to a file."""

    def __init__(self, folder: str) -> None:
        super().__init__(DirFileSystem(folder, LocalFileSystem(auto_mkdir=True)))
        self._folder = folder

    def __reduce__(self) -> Any:
        return Store, (self._folder,)

    def open_append_stream(self, path: str, metadata: object) -> None:
        raise NotImplementedError


class Late(Searcher):  # type: ignore[misc]
    """Suggests a few trials, and more once one of those has come far."""

    def __init__(self, first: list[float], then: list[float], after: int) -> None:
        super().__init__(metric="loss", mode="min")
        self._ready, self._then, self._after = list(first), list(then), after
        self.late: set[str] = set()
        self._opened = False

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if not self._ready:
            return Searcher.FINISHED if self._opened else None
        if self._opened:
            self.late.add(trial_id)
        return {"x": self._ready.pop(0), "iterations": 100}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if not self._opened and result["training_iteration"] >= self._after:
            self._ready, self._opened = self._ready + self._then, True

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        pass


class EndsAll(tune.Stopper):  # type: ignore[misc]
    """Ends the experiment once a trial has come so far."""

    def __init__(self, t: int) -> None:
        self._t, self._reached = t, False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self._reached |= result["training_iteration"] >= self._t
        return False

    def stop_all(self) -> bool:
        return self._reached


class HoldsHalf(tune.Callback):  # type: ignore[misc]
    """Holds workers that the scheduler counts on, until a trial has failed, or the other one has come to run, too.

    Attributes:
        failed: Whether one has.
    """

    def __init__(self, workers: int) -> None:
        self.failed = False
        self._reported: set[str] = set()
        self._group = placement_group([{"CPU": workers}])
        assert self._group.wait()

    def on_step_begin(self, iteration: int, trials: list, **info: Any) -> None:
        """Just before the scheduler is asked, which may have the trial start again."""
        self.failed |= any(trial.status == "ERROR" for trial in trials)
        if self.failed or len(self._reported) == 2:
            remove_placement_group(self._group)

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        self._reported.add(trial.trial_id)


class Watch(tune.Callback):  # type: ignore[misc]
    """What trials reported, the workers in use, and how many new trials started while one was paused."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int, float]] = []
        self.overtaken: list[int] = []
        self.used: list[int] = []
        self.line: list[tuple[str, str]] = []
        self._idle: dict[str, int] = {}
        self._queued: set[str] = set()
        self._new_starts = 0

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        self.reports.append((trial.trial_id, result["training_iteration"], result["loss"]))

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._new_starts += not trial.last_result
        self._queued.discard(trial.trial_id)
        self.line.append(("start", trial.trial_id))

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        running = [t for t in trials if t.status == "RUNNING"]
        self.used.append(sum(len(t.placement_group_factory.bundles) for t in running))
        for trial in running:
            if trial.trial_id in self._idle:
                self.overtaken.append(self._new_starts - self._idle.pop(trial.trial_id))
        for trial in trials:
            if trial.status == "PAUSED":
                self._idle.setdefault(trial.trial_id, self._new_starts)
            if trial.status in ("PENDING", "PAUSED") and trial.trial_id not in self._queued:
                self._queued.add(trial.trial_id)
                self.line.append(("wait", trial.trial_id))

    def overtaken_as_oldest(self) -> int:
        """The most starts of others that the longest waiting trial saw."""
        waiting: list[str] = []
        longest = count = 0
        for event, trial in self.line:
            if event == "wait":
                waiting.append(trial)
            elif trial in waiting:
                count = 0 if waiting[0] == trial else count + 1
                waiting.remove(trial)
                longest = max(longest, count)
        return longest


class Opens(Watch):
    """A watch that makes a file once trials have started, reported or ended so often."""

    def __init__(self, path: Path, event: str, times: int) -> None:
        super().__init__()
        self._path, self._event, self._left = str(path), event, times

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        super().on_trial_start(iteration, trials, trial, **info)
        self._saw("start")

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        super().on_trial_result(iteration, trials, trial, result, **info)
        self._saw("result")

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._saw("end")

    def _saw(self, event: str) -> None:
        self._left -= event == self._event
        if self._left <= 0:
            Path(self._path).touch()
