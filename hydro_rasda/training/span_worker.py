"""A rank of a full-size trial that leaves its training function when a unit of work ends."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from hydro_rasda.contracts import EpochMetrics, FullSizeTask, History
from hydro_rasda.data import ALONE, Shard
from hydro_rasda.problem import Problem
from hydro_rasda.training.worker import Saving, State, Worker
from hydro_rasda.trial import Trial

METRICS = ("train_", "val_")
"""Prefixes of the metrics that a run keeps."""


class Over(BaseException):
    """Raised to leave the training function when its part ends; `except Exception` does not catch it."""


class SpanWorker(Worker):
    """Train to an epoch, or until `should_stop`; all ranks leave the training function when rank 0 does.

    Its configuration is the trial's number and configuration, its data the problem: `user_loop` gives a function of the
    user's those that it knows.

    Args:
        should_stop: Asked after each epoch; rank 0's answer counts.
        on_epoch: Called by rank 0 after each epoch.
        kept: Names of values that the run keeps beside metrics.

    Attributes:
        history: The epochs, on rank 0.
        saving: The state after the last epoch, or a function that returns it; None before the first.
        left: True if the worker has left the function because training pauses here.
    """

    def __init__(
        self,
        problem: Problem,
        trial: Trial,
        task: FullSizeTask,
        state: State | None,
        should_stop: Callable[[], bool],
        on_epoch: Callable[[int, EpochMetrics], None],
        shard: Shard = ALONE,
        carried: Mapping[str, Any] = MappingProxyType({}),
        kept: Collection[str] = (),
    ) -> None:
        config, world = {"trial": trial.number, "config": copy.deepcopy(dict(trial.config))}, shard.world
        job = {"config": config, "trial": str(trial.number), "rank": shard.rank, "world_size": world, "workers": world}
        saved = {"state": state, "iteration": task.span.start, "rescaled": [], "measured": {}, **carried}
        super().__init__(job, problem, problem.device, saved)
        self._settings, self._stop, self._kept = problem.settings, task.span.stop, kept
        self._should_stop, self._on_epoch = should_stop, on_epoch
        self.history: History = []
        self.saving: Saving = None
        self.left = False

    def report(self, metrics: Mapping[str, Any], state: Saving = None, *, final: bool = False) -> None:
        if self.left:  # the function went on all the same
            raise Over
        super().report(metrics, state, final=final)
        if self.world_size > 1:
            said = torch.tensor(int(self.left), device=self.device)
            dist.broadcast(said, 0)
            self.left = bool(said)
        if self.left:
            raise Over

    def reached(self, before: State | None) -> State | None:
        """The state that training came to; where nothing was reported, that from which it went on."""
        if self.rank == 0 and self.saving is None and before is None:
            raise ValueError(
                "`race.train` returned without a report, but must end each epoch with `worker.report(...)`"
            )
        return self.saving() if callable(self.saving) else self.saving or before

    def _attend(self, saving: Saving, final: bool) -> None:
        self.saving = saving

    def _deliver(self, results: dict[str, Any], saving: Saving, final: bool) -> None:
        self.saving = saving
        kept = {name: value for name, value in results.items() if name.startswith(METRICS) or name in self._kept}
        self.history.append((self.iteration, kept))
        self._on_epoch(self.iteration, {name: [value] for name, value in kept.items() if name.startswith(METRICS)})
        score = kept[self._settings.metric]
        over = not math.isfinite(score) or self._settings.good_enough(score)
        self.left = over or self.iteration >= self._stop or (not final and self._should_stop())
