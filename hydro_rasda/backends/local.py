"""This machine, as one device: the default."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

import torch

from ..fused import GroupTask
from ..grouping import Widths
from ..problem import Trial
from ..run import Run, Stage
from ..single import TargetOutcome, TargetTask
from ..sweep import Finished
from ..targets import train_targets
from ..train import EpochMetrics
from .device import Device, Work


class LocalBackend:
    """One device, which trains groups of surrogates, then the full-size finalists."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._device = Device(run.problem)
        self._task: GroupTask | None = None

    def idle(self) -> Sequence[int]:
        return [] if self.busy() else [0]

    def busy(self) -> bool:
        return self._task is not None

    def speed(self, device: int, kind: str) -> None:
        """There is no other to compare with."""

    def machine(self, device: int) -> str:
        return self._device.machine

    def cores(self, device: int) -> int:
        return self._device.cores

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]]) -> Mapping[str, Widths]:
        return self._device.plan(kinds)

    def start(self, device: int, task: GroupTask) -> None:
        self._task = task

    def finished(self) -> Sequence[Finished]:
        task = self._task
        assert task is not None
        started = time.perf_counter()
        outcome = self._device.train_groups(task, self._work("surrogate"))
        self._task = None
        return [Finished(task, outcome, time.perf_counter() - started)]

    def told(self, share: float, best: Sequence[int]) -> None:
        """The finalists wait until the sweep is done: there is no other device."""

    def train_each(self, tasks: Iterable[TargetTask]) -> Iterator[TargetOutcome]:
        tasks = iter(tasks)
        while together := list(islice(tasks, self._device.cores)):
            yield from self._device.train_targets(together, self._work("target"))

    def _work(self, stage: Stage) -> Work:
        run = self._run

        def load(key: str) -> Any:
            return run.store.load(key, run.problem.device)

        def tell(epochs: int, metrics: EpochMetrics) -> None:
            run.progress.advance(epochs, run.note(metrics))

        return Work(run.trials, load, lambda: run.out_of_time(stage), tell)

    def train_targets(self, finalists: Sequence[int]) -> list[int]:
        """Train the full-size models, halving them at RASDA's milestones; all that were begun."""
        return train_targets(self._run, finalists, self)

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to let go of."""


def default_device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
