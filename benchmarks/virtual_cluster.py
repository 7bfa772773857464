"""Drive the engine of `tune` in virtual time: devices that train nothing, but fail, leave and come back.

All else is as in a real search: the sweep and the race with their rules, the queue of groups, journal and checkpoints.
"""

from __future__ import annotations

import heapq
import os
import random
import resource
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

from benchmarks.fixed_costs import Numbers
from hydro_rasda import RaceConfig, SweepConfig
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Finished, History, Outcome, Task, Widths
from hydro_rasda.data import make_batches
from hydro_rasda.heats.race import Race
from hydro_rasda.heats.sweep import Sweep
from hydro_rasda.history.lines import Unit
from hydro_rasda.problem.objective import supervised
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.settings.config import TuneConfig

DIES = 0.01
"""Share of tasks in which a device dies, at a random moment."""

_MEMORY = "/dev/shm"

AWAY = 5.0
"""Mean virtual seconds until a device comes back that has died."""


class _Event(NamedTuple):
    """The end of a task, or of a device's absence (no task), at a virtual time. `number` orders equal times."""

    at: float
    number: int
    device: int
    task: Task | None
    died: bool = False


class VirtualCluster:
    """Devices of several speeds in virtual time; see `hydro_rasda.contracts.Devices`.

    A task whose device dies begins again on another one, as soon as one is idle.

    Attributes:
        now: Virtual seconds since the beginning.
        seconds: CPU seconds of the cluster itself.
        done: Number of tasks that are done.
        deaths: Number of deaths of devices.
    """

    def __init__(self, devices: int, seed: int = 0) -> None:
        self.now, self.seconds, self.done, self.deaths = 0.0, 0.0, 0, 0
        self._random = random.Random(seed)
        self._idle = dict.fromkeys(range(devices))
        self._speeds = [self._random.choice([1.0, 1.0, 2.0]) for _ in range(devices)]
        self._events: list[_Event] = []
        self._count = 0
        self._interrupted = deque[Task]()

    def idle(self, task: Task | None = None) -> list[int]:
        return list(self._idle)

    def busy(self) -> bool:
        return bool(self._events)

    def speed(self, device: int, kind: str) -> float:
        return self._speeds[device]

    def machine(self, device: int) -> str:
        return f"a machine of speed {self._speeds[device]:g}"

    def cores(self, device: int) -> int:
        return 1

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None) -> dict[str, Widths]:
        return dict.fromkeys(kinds, Widths(16, 2, {1: 1.0, 16: 8.0}))

    def start(self, device: int, task: Task) -> None:
        del self._idle[device]
        epochs = task.span.stop - task.span.start
        seconds = self._random.uniform(0.8, 1.2) * epochs * (1 + len(task.members) / 8) / self._speeds[device]
        died = self._random.random() < DIES
        self._follows(self._random.random() * seconds if died else seconds, device, task, died)

    def _follows(self, seconds: float, device: int, task: Task | None, died: bool = False) -> None:
        self._count += 1
        heapq.heappush(self._events, _Event(self.now + seconds, self._count, device, task, died))

    def finished(self) -> list[Finished]:
        began = time.process_time()
        try:
            return self._next()
        finally:
            self.seconds += time.process_time() - began

    def _next(self) -> list[Finished]:
        self.now, _, device, task, died = heapq.heappop(self._events)
        if died and task is not None:
            self.deaths += 1
            self._interrupted.append(task)
            self._follows(self._random.expovariate(1 / AWAY), device, None)
        else:
            self._idle[device] = None
        if self._interrupted and self._idle:
            self.start(next(iter(self._idle)), self._interrupted.popleft())
        if died or task is None:
            return []
        self.done += 1
        return [Finished(task, self._outcome(task), device)]

    def _outcome(self, task: Task) -> Outcome:
        history = {number: _epochs(task, number) for number in task.members}
        if task.heat == "race":
            state = {"model": {}, "epoch": task.span.stop}
            return Outcome.of_model(task.number, state, history[task.number], 1.0)
        return Outcome([{"members": [*task.members], "state": {}}], history, {})


def _epochs(task: Task, number: int) -> History:
    end = random.Random(number).random()
    scores = {epoch: end + 1 / epoch for epoch in range(task.span.start + 1, task.span.stop + 1)}
    return [(epoch, {"train_loss": score, "val_loss": score}) for epoch, score in scores.items()]


class _Given:
    """A search whose configurations are all known at the beginning."""

    def __init__(self, trials: list[Trial]) -> None:
        self.given, self.planned, self.late = trials, len(trials), False

    def next_trials(self) -> list[Trial]:
        return []

    def hear(self, key: str, unit: Unit) -> None:
        """Do nothing, because all configurations are known."""

    def close(self, number: int) -> None:
        """Do nothing, because all configurations are known."""


def engine(trials: int, devices: int) -> Numbers:
    """Measure the driver's CPU milliseconds for each finished task of a search, and the most MB that its process held.

    The time of the virtual devices does not count. Checkpoints and journal are written to a folder in memory if the
    system has one. They are never forced to a disk, because the time of the disk does not count.
    """
    memory = _MEMORY if os.path.isdir(_MEMORY) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, mock.patch.object(os, "fsync", _never_forced):
        run, given = _run(Path(folder) / "run", trials)
        cluster, began = VirtualCluster(devices), time.process_time()
        race = Race(run, cluster)
        sweep = Sweep(run, given, cluster, race=race)
        sweep.train()
        race.between(sweep.finalists())
        seconds = time.process_time() - began - cluster.seconds
        run.store.close()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ms": 1e3 * seconds / cluster.done, "MB": held, "tasks": cluster.done, "deaths": cluster.deaths}


def _never_forced(file: int) -> None:
    """Leave it to the system when a file reaches the disk."""


def _run(path: Path, trials: int) -> tuple[Run, _Given]:
    """Make a run that has already recorded the kinds of its models, three in all, so that no model is built."""
    cpu = torch.device("cpu")
    data = make_batches((torch.zeros(4, 16), torch.zeros(4, dtype=torch.int64)), "train_data", cpu, 0)
    race, sweep = RaceConfig(top_k=4), SweepConfig(surrogate=0.5)
    settings = TuneConfig(num_samples=trials, max_t=27, race=race, sweep=sweep)
    run = Run(Problem(_no_model, supervised(), data, data, settings, cpu), Store.open(path, {}, "auto"))
    given = [Trial(number, {"lr": 0.1, "batch_size": 4}) for number in range(trials)]
    lines = [{"event": "trial", "trial": trial.number, "config": dict(trial.config)} for trial in given]
    run.record("sweep/kinds-from-0", Unit({str(n): f"kind-{n % 3}" for n in range(trials)}, lines))
    return run, _Given(given)


def _no_model(config: Mapping[str, object]) -> nn.Module:
    raise NotImplementedError
