"""Everything in this process, on one device: the default."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from fusion import keep_freed_memory

from ..fused import GroupTask, train_group
from ..planning import Widths, machine, planned_widths
from ..problem import Trial
from ..run import Run
from ..sweep import SWEEP_SHARE, Finished
from ..targets import train_targets
from ..train import EpochMetrics, History, Span, train_target


class LocalBackend:
    """One device, which trains groups of surrogates, then the full-size finalists, one after another."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._task: GroupTask | None = None
        if run.problem.device.type == "cpu":
            # Page faults on blocks that were freed a step before can take half of a fused step.
            keep_freed_memory()

    def idle(self) -> Sequence[int]:
        return [] if self.busy() else [0]

    def busy(self) -> bool:
        return self._task is not None

    def speed(self, device: int, kind: str) -> None:
        """There is no other to compare with."""

    def machine(self, device: int) -> str:
        return machine(self._run.problem.device)

    def plan(self, device: int, trial: Trial, kind: str, count: int) -> Widths:
        return planned_widths(self._run.problem, trial, kind, count)

    def start(self, device: int, task: GroupTask) -> None:
        self._task = task

    def finished(self) -> Sequence[Finished]:
        run, task = self._run, self._task
        assert task is not None

        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            run.progress.advance(len(task.group.members), run.note(metrics))

        def load(key: str) -> list[dict[str, Any]]:
            parts: list[dict[str, Any]] = run.store.load(key, run.problem.device)["parts"]
            return parts

        started = time.perf_counter()
        outcome = train_group(run.problem, run.trials, task, load, lambda: run.out_of_time(SWEEP_SHARE), on_epoch)
        self._task = None
        return [Finished(task, outcome, time.perf_counter() - started)]

    def told(self, share: float, best: Sequence[int]) -> None:
        """The finalists wait until the sweep is done: there is no other device."""

    def train_target(
        self, number: int, span: Span, state: Mapping[str, Any] | None, seed: int
    ) -> tuple[Mapping[str, Any], History]:
        run = self._run

        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            run.progress.advance(1, f"trial {number}: {run.note(metrics)}")

        problem = replace(run.problem, seed=seed)
        return train_target(problem, run.trials[number], span, state, lambda: run.out_of_time(1.0), on_epoch)

    def train_targets(self, finalists: Sequence[int]) -> list[int]:
        """Train the full-size models, halving them at RASDA's milestones; all that were begun."""
        train_targets(self._run, finalists, self)
        return list(finalists)

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to let go of."""


def default_device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
