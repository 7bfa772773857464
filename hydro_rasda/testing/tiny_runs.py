"""Runs that train in milliseconds, and functions that use a backend's devices as a run does."""

from __future__ import annotations

import functools
import math
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydro_rasda.backends.local import LocalBackend
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import (
    Backend,
    Devices,
    Finished,
    Group,
    History,
    Span,
    Task,
    full_size_task,
    group_key,
)
from hydro_rasda.data import make_batches
from hydro_rasda.history.lines import Unit, metric_lines
from hydro_rasda.problem.objective import supervised
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.record_full_size import record_epochs
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.settings.config import RaceConfig, SweepConfig, TuneConfig

PATIENCE_S = 600.0
"""The most seconds that a check waits for its trainings, including the start of processes."""

MAX_T = 4
_FIRST = Span(0, 2)


def model_fn(config: Mapping[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """Build a model for the checks, or fail, kill the process or wait, if the configuration says so."""
    if config.get("raises"):
        raise RuntimeError("this trial raises")
    if config.get("kills_other_than") == os.getpid():
        raise RuntimeError("this trial dies")
    if "kills_other_than" in config:
        os.kill(os.getpid(), signal.SIGKILL)
    if "waits_in" in config:
        if os.getpid() == config["tuner"]:
            raise KeyboardInterrupt
        Path(config["waits_in"], f"{os.getpid()}@{socket.gethostname()}").touch()
        time.sleep(PATIENCE_S)
    width = int(8 * width_ratio)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


@contextmanager
def opened(
    backend: Backend, folder: Path, configs: Sequence[Mapping[str, Any]], **settings: Any
) -> Iterator[tuple[Run, Devices]]:
    """Open a run of some trials, as a process that resumes it would, and yield the run with its devices."""
    race = RaceConfig(grace_period=1, max_workers=1)
    asked = TuneConfig(max_t=MAX_T, sweep=SweepConfig(surrogate=0.5), race=race, **settings)
    trials = {number: Trial(number, {"batch_size": 8, **config}) for number, config in enumerate(configs)}
    with Store.open(folder, {}, "auto") as store:
        x = torch.rand(32, 4, generator=torch.Generator().manual_seed(0))
        data = x, (x.sum(1) > 2).long()
        train, val = (make_batches(data, name, backend.device, 0) for name in ("train_data", "val_data"))
        run = Run(Problem(model_fn, supervised(), train, val, asked, backend.device), store, known=trials)
        run.history.trials |= trials
        run.fold()
        with backend.open(run) as devices:
            yield run, devices


def require(holds: bool, promise: str) -> None:
    """Raise an AssertionError that names the promise, unless it `holds`."""
    if not holds:
        raise AssertionError(f"a backend breaks its contract: {promise}")


@functools.cache
def references() -> list[LocalBackend]:
    """Return a local backend with one device for each sort of device (CPU, CUDA) that this machine has."""
    return [LocalBackend(["cpu"]), *([LocalBackend(["cuda:0"])] if torch.cuda.is_available() else [])]


def group(
    *members: int,
    span: Span = _FIRST,
    sources: tuple[str, ...] = (),
    heat: HeatName = "sweep",
    width: float | None = None,
) -> Task:
    """Make a task of trials that train as one fused group."""
    members_fused = Group("a kind", members, fused=len(members) > 1)
    return Task(group_key(heat, span, members), (members_fused,), sources, span, heat, width)


def targets(run: Run, stop: int) -> list[Task]:
    """Make a task for each trial: train it at full size from its last checkpoint to epoch `stop`."""
    history = run.history
    spans = {n: Span(history.epochs("race", n), stop) for n in history.trials}
    source, many = history.checkpoints.get, len(spans)
    return [full_size_task(f"race/{n}", n, span, source(n), 0, many) for n, span in spans.items()]


def train(devices: Devices, tasks: Iterable[Task], room: float = math.inf) -> list[Finished]:
    """Train tasks on the devices, as a run does. Require that at most `room` tasks train at the same time."""
    waiting, done = list(tasks), list[Finished]()
    until, begun = time.monotonic() + PATIENCE_S, 0
    while waiting or devices.busy():
        while waiting and (idle := devices.idle(waiting[0])):
            devices.start(idle[0], waiting.pop(0))
            begun += 1
            require(begun - len(done) <= room, f"no more tasks begin than the {room} that devices have room for")
            require(idle[0] not in devices.idle(), "a device is not `idle` before it has finished its task")
            require(devices.busy(), "devices are `busy` while one has a task")
        done += devices.finished()
        require(time.monotonic() < until, f"what was begun is finished in {PATIENCE_S:g} s")
    return done


def train_two_rungs(backend: Backend, folder: Path, configs: Sequence[Mapping[str, Any]]) -> dict[int, History]:
    """Train a group to epoch 2, then each member alone from epoch 2 to 4. Return the history of each trial."""
    with opened(backend, folder, configs) as (run, devices):
        (first,) = train(devices, [group(0, 1)])
        key = first.task.key
        run.store.save(key, {"parts": first.outcome.checkpoint})
        lines = [line for n, history in first.outcome.history.items() for line in metric_lines("sweep", n, history)]
        run.record(key, Unit({"members": [0, 1], "stop": 2, "groups": [[0, 1]]}, lines))
        later = train(devices, [group(n, span=Span(2, 4), sources=(key,)) for n in (0, 1)])
    after = histories(later)
    return {n: first.outcome.history[n] + after[n] for n in (0, 1)}


def histories(done: Iterable[Finished]) -> dict[int, History]:
    """Return the history of each trial, from all finished tasks."""
    return {number: history for finished in done for number, history in finished.outcome.history.items()}


def require_each_once(done: Sequence[Finished], numbers: Iterable[int]) -> None:
    """Require exactly one outcome of each trial, and a checkpoint of each trial that did not fail."""
    trained = sorted(number for finished in done for number in finished.outcome.history)
    require(trained == sorted(numbers), f"each trial trains once, but {trained} did")
    kept = sorted(n for finished in done for part in finished.outcome.checkpoint for n in part["members"])
    failed = {n for finished in done for n in finished.outcome.failures}
    require(sorted({*numbers} - failed) == kept, f"checkpoints hold each trial that did not fail, not {kept}")


def require_one_failure(done: Sequence[Finished], number: int, why: str) -> None:
    """Require that only the trial `number` failed, with an error that contains `why`."""
    failures = {n: error for finished in done for n, error in finished.outcome.failures.items()}
    require_each_once(done, histories(done))
    require(failures.keys() == {number}, f"trial {number} fails alone, not {sorted(failures)}")
    require(why in failures[number], f"a failure says what was raised, not {failures[number]!r}")


def record(run: Run, finished: Finished) -> None:
    """Record the outcome of a full-size training, as the race does."""
    number, outcome = finished.task.number, finished.outcome
    record_epochs(run, number, metric_lines("race", number, outcome.epochs), outcome.state, outcome.seconds)


def by_epoch(done: Iterable[Finished]) -> dict[tuple[int, int], Mapping[str, float]]:
    """Map trial and epoch to the metrics of finished tasks."""
    histories_of = (item for finished in done for item in finished.outcome.history.items())
    return {(number, epoch): metrics for number, history in histories_of for epoch, metrics in history}


def is_running(pid: int) -> bool:
    """Return whether this pid belongs to another process that has not ended; a zombie has ended."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
