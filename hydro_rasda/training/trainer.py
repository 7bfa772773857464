"""What the process of a device does where that is not the tuner's own: it trains what it is sent.

It imports no more than that takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hydro_rasda.contracts import EpochMetrics, FullSizeOutcome, FullSizeTask, GroupOutcome, GroupTask, Widths
from hydro_rasda.data import Shard, move
from hydro_rasda.problem import Problem
from hydro_rasda.processes.forks import Notify
from hydro_rasda.training.device import WHOLE, Device, Share, Work
from hydro_rasda.training.distributed import Place, train_target_on_ranks
from hydro_rasda.training.fused import Load
from hydro_rasda.training.rendezvous import Store, file_store
from hydro_rasda.trial import Trial


@dataclass(frozen=True)
class Given:
    """What a device gets with a task.

    Attributes:
        load: Gives an earlier task's checkpoint by its key, on the CPU.
        seconds: That it may take.
        devices: How many share the full-size trials.
    """

    trials: Mapping[int, Trial]
    load: Load
    seconds: float
    devices: int = 1


class Trainer:
    """Trains on one device, in a process of its own.

    Args:
        threads: Of torch.
        should_leave: Whether to end after the epoch that is under way, whatever time there is.
    """

    def __init__(
        self,
        problem: Problem,
        where: torch.device,
        threads: int,
        notify: Notify = lambda *reported: None,
        should_leave: Callable[[], bool] = lambda: False,
        share: Share = WHOLE,
    ) -> None:
        torch.set_num_threads(threads)
        self._where, self._notify, self._should_leave = where, notify, should_leave
        self._problem = problem.on(where)
        self._device = Device(self._problem, may_die=True, share=share)

    def describe(self) -> tuple[str, int, str]:
        """`Device.machine` and `Device.cores`, and the node that it is on, where a backend has several."""
        return self._device.machine, self._device.cores, ""

    def plan(self, kinds: Mapping[str, Sequence[Trial]]) -> dict[str, Widths]:
        """See `Device.plan`."""
        return self._device.plan(kinds)

    def train_groups(self, task: GroupTask, given: Given) -> tuple[GroupOutcome, float]:
        """Train groups; what it gave, on the CPU, and the seconds that it took."""
        started = time.monotonic()
        outcome = self._device.train_groups(task, self._work(given))
        return replace(outcome, checkpoint=move(outcome.checkpoint, _CPU, wait=True)), time.monotonic() - started

    def train_full_size(self, tasks: Sequence[FullSizeTask], given: Given) -> list[FullSizeOutcome]:
        """Train full-size trials at the same time; their states are on the CPU."""
        outcomes = self._device.train_full_size(tasks, self._work(given), given.devices)
        return [replace(outcome, state=move(outcome.state, _CPU, wait=True)) for outcome in outcomes]

    def train_rank(self, task: FullSizeTask, given: Given, place: Place, meeting: Any) -> FullSizeOutcome:
        """Train a full-size trial as one of several ranks, each a trainer of its own.

        Args:
            meeting: Where the ranks find each other: here, a file.
        """
        work, open_store = self._work(given), partial(self._store, place.shard, meeting)

        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            self._notify(1, metrics)

        # On the CPU: a rank of several may hold a part alone.
        trial, state = work.trials[task.number], given.load(task.source) if task.source is not None else None
        told = work.should_stop, on_epoch
        outcome = train_target_on_ranks(self._problem, trial, task, state, place, open_store, *told)
        return replace(outcome, state=move(outcome.state, _CPU, wait=True))

    def _store(self, shard: Shard, meeting: Any) -> Store:
        """What a rank finds the others by."""
        return file_store(meeting, shard.world)

    def _work(self, given: Given) -> Work:
        deadline = time.monotonic() + given.seconds

        def load(key: str) -> Any:
            return move(given.load(key), self._where, wait=True)

        def should_stop() -> bool:
            return time.monotonic() >= deadline or self._should_leave()

        return Work(given.trials, load, should_stop, self._notify)


_CPU = torch.device("cpu")
