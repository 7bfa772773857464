"""What the process of a Ray device does: it trains what it is given.

It imports no more than that takes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from ..data import move
from ..fused import GroupOutcome, GroupTask
from ..grouping import Widths
from ..problem import Problem, Trial
from ..single import TargetOutcome, TargetTask
from .device import Device, Work


@dataclass(frozen=True)
class Given:
    """What a device gets with a task.

    Attributes:
        trials: By number.
        checkpoints: Of earlier tasks, by key, on the CPU.
        seconds: That it may take.
    """

    trials: Mapping[int, Trial]
    checkpoints: Mapping[str, Mapping[str, Any]]
    seconds: float


class Trainer:
    """What a device's actor runs."""

    def __init__(self, problem: Problem, threads: int) -> None:
        torch.set_num_threads(threads)
        self._where = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        self._device = Device(problem.on(self._where))

    def describe(self) -> tuple[str, int]:
        """`Device.machine` and `Device.cores`."""
        return self._device.machine, self._device.cores

    def plan(self, kinds: Mapping[str, Sequence[Trial]]) -> dict[str, Widths]:
        """See `Device.plan`."""
        return self._device.plan(kinds)

    def train_groups(self, task: GroupTask, given: Given) -> tuple[GroupOutcome, float]:
        """Train groups; what it gave, on the CPU, and the seconds that it took."""
        started = time.monotonic()
        outcome = self._device.train_groups(task, self._work(given))
        return replace(outcome, checkpoint=move(outcome.checkpoint, _CPU, wait=True)), time.monotonic() - started

    def train_targets(self, tasks: Sequence[TargetTask], given: Given) -> list[TargetOutcome]:
        """Train full-size trials beside each other; their states are on the CPU."""
        outcomes = self._device.train_targets(tasks, self._work(given))
        return [replace(outcome, state=move(outcome.state, _CPU, wait=True)) for outcome in outcomes]

    def _work(self, given: Given) -> Work:
        deadline = time.monotonic() + given.seconds

        def load(key: str) -> Any:
            return move(given.checkpoints[key], self._where, wait=True)

        return Work(given.trials, load, lambda: time.monotonic() >= deadline, lambda *_: None)


_CPU = torch.device("cpu")
