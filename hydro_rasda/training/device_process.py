"""Train tasks in a device's own process, apart from the tuner's process.

This module imports only the modules that training needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import EpochMetrics, Finished, Outcome, Task, Widths
from hydro_rasda.data import Shard, move
from hydro_rasda.problem.problem import Problem
from hydro_rasda.processes.forks import Notify
from hydro_rasda.processes.without_compiler import leave_out_compiler
from hydro_rasda.training.device import WHOLE, DeviceShare, DeviceTrainer, Work
from hydro_rasda.training.distributed import Store, file_store
from hydro_rasda.training.full_size import told_of
from hydro_rasda.training.full_size_on_ranks import RankPlace, train_target_on_ranks
from hydro_rasda.training.group_training import Load


@dataclass(frozen=True)
class Given:
    """The data that a device's process gets with a task.

    Attributes:
        load: Returns an earlier task's checkpoint by its key, on the CPU.
        seconds: The time that the task may take.
        devices: Number of devices that share the full-size trials.
    """

    trials: Mapping[int, Trial]
    load: Load
    seconds: float
    devices: int = 1


class Trainer:
    """Train on one device, in its own process.

    Args:
        should_leave: Returns whether to end after the current epoch, even if there is time left.
    """

    def __init__(
        self,
        problem: Problem,
        where: torch.device,
        threads: int,
        notify: Notify = lambda *reported: None,
        should_leave: Callable[[], bool] = lambda: False,
        share: DeviceShare = WHOLE,
    ) -> None:
        torch.set_num_threads(threads)
        leave_out_compiler()
        self._where, self._notify, self._should_leave = where, notify, should_leave
        self._problem = problem.on(where)
        self._device = DeviceTrainer(self._problem, may_die=True, share=share)

    def describe(self) -> tuple[str, int, str]:
        """Return `Device.machine`, `Device.cores` and the device's node, which is "" here."""
        return self._device.machine, self._device.cores, ""

    def plan(
        self, kinds: Mapping[str, Sequence[Trial]], seconds: float, width: float | None = None
    ) -> dict[str, Widths]:
        return self._device.plan(kinds, seconds, width)

    def train(self, tasks: Sequence[Task], given: Given) -> list[Finished]:
        """Train tasks at the same time; their checkpoints are moved to the CPU."""
        found = self._device.train(tasks, self._work(given), given.devices)
        return [replace(finished, outcome=_on_cpu(finished.outcome)) for finished in found]

    def train_rank(self, task: Task, given: Given, place: RankPlace, meeting: Any) -> Outcome:
        """Train a full-size trial as one of several ranks, which find each other by the file `meeting`."""
        self._device.forget_group()
        work, open_store = self._work(given), partial(self._store, place.shard, meeting)

        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            self._notify(1, metrics, told_of(task, epoch, metrics))

        # The state stays on the CPU: under FSDP, a rank's device may have memory for its part only.
        trial, state = work.trials[task.number], given.load(task.source) if task.source is not None else None
        told = work.should_stop, on_epoch
        return _on_cpu(train_target_on_ranks(self._problem, trial, task, state, place, open_store, *told))

    def _store(self, shard: Shard, meeting: Any) -> Store:
        """Return the store through which the ranks find each other."""
        return file_store(meeting, shard.world)

    def _work(self, given: Given) -> Work:
        deadline = time.monotonic() + given.seconds

        def load(key: str) -> Any:
            return move(given.load(key), self._where, wait=True)

        def should_stop() -> bool:
            return time.monotonic() >= deadline or self._should_leave()

        return Work(given.trials, load, should_stop, self._notify)


def _on_cpu(outcome: Outcome) -> Outcome:
    return replace(outcome, checkpoint=move(outcome.checkpoint, torch.device("cpu"), wait=True))
