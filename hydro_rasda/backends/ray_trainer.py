"""What the process of a Ray device does: it trains what it is given.

It imports no more than that takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
import torch

from fusion import keep_freed_memory

from ..data import move
from ..fused import GroupOutcome, GroupTask, train_group
from ..planning import Widths, machine, planned_widths
from ..problem import Problem, Trial
from ..train import History, Span, train_target


class Trainer:
    """What a device's actor runs."""

    def __init__(self, problem: Problem, threads: int) -> None:
        torch.set_num_threads(threads)
        device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        if device.type == "cpu":
            keep_freed_memory()
        self._problem = problem.on(device)

    def machine(self) -> str:
        """Equal for devices that are equally fast."""
        return machine(self._problem.device)

    def plan(self, trial: Trial, kind: str, count: int) -> Widths:
        """See `planned_widths`."""
        return planned_widths(self._problem, trial, kind, count)

    def train(
        self,
        trials: Mapping[int, Trial],
        task: GroupTask,
        sources: Mapping[str, list[dict[str, Any]]],
        seconds_left: float,
    ) -> tuple[GroupOutcome, float]:
        """Train a group; what it gave, on the CPU, and the seconds that it took."""
        started = time.monotonic()

        def load(key: str) -> list[dict[str, Any]]:
            parts: list[dict[str, Any]] = move(sources[key], self._problem.device, wait=True)
            return parts

        outcome = train_group(self._problem, trials, task, load, _after(seconds_left))
        return replace(outcome, checkpoint=move(outcome.checkpoint, _CPU, wait=True)), time.monotonic() - started

    def train_target(
        self, trial: Trial, span: Span, state: Mapping[str, Any] | None, seed: int, seconds_left: float
    ) -> tuple[dict[str, Any], History]:
        """Train a full-size trial; its state is on the CPU."""
        problem = replace(self._problem, seed=seed)
        state = move(state, problem.device, wait=True)
        after, history = train_target(problem, trial, span, state, _after(seconds_left))
        return move(after, _CPU, wait=True), history


_CPU = torch.device("cpu")


def _after(seconds: float) -> Callable[[], bool]:
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() >= deadline
