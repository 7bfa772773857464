"""Runs whose sweep is over, and devices that are taken away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Devices, Task
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from tests.hydro_rasda.scripted import run_of


def open_run(path: Path, problem: Problem, configs: list[dict[str, Any]], **settings: Any) -> Run:
    """A run of these finalists, as the next process would open it."""
    store = Store.open(path, {}, "auto")
    trials = {number: Trial(number, config) for number, config in enumerate(configs)}
    return run_of(problem.with_settings(**settings), store, trials)


def for_tasks(devices: Devices, count: int) -> Devices:
    """The same devices, which are idle no more after so many tasks."""
    begun: list[str] = []

    def idle(task: Task | None = None) -> Any:
        return devices.idle(task) if len(begun) < count else []

    def start(device: int, task: Task) -> None:
        begun.append(task.key)
        devices.start(device, task)

    return cast(Devices, SimpleNamespace(idle=idle, start=start, finished=devices.finished, busy=devices.busy))
