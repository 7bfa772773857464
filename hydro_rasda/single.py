"""One trial at full size: what a device does with it between two milestones."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .problem import Problem, Trial
from .train import EpochMetrics, History, SingleLearner, Span, remember_best, train_epochs


@dataclass(frozen=True)
class TargetTask:
    """A unit of work: one full-size model, for a span of epochs.

    Attributes:
        key: Tells it from all others of the run.
        number: The trial.
        span: Which epochs.
        source: Name of the checkpoint to go on from; None starts from the trial's initial weights.
        seed: Determines those, and dropout.
        beside: How many trials share the device with it, itself included: as many as are trained to this milestone.
    """

    key: str
    number: int
    span: Span
    source: str | None
    seed: int
    beside: int = 1


@dataclass(frozen=True)
class TargetOutcome:
    """What training a full-size model gave.

    Attributes:
        task: What was asked for.
        state: To go on from; None where it failed.
        history: Epochs trained, with the metrics after each.
        error: Traceback, where it failed.
        seconds: Wall time that it took.
    """

    task: TargetTask
    state: Mapping[str, Any] | None
    history: History
    error: str | None
    seconds: float


def train_target(
    problem: Problem,
    trial: Trial,
    task: TargetTask,
    state: Mapping[str, Any] | None,
    should_stop: Callable[[], bool] = lambda: False,
    on_epoch: Callable[[int, EpochMetrics], None] = lambda epoch, metrics: None,
) -> TargetOutcome:
    """Train one full-size model for a span of epochs.

    Args:
        problem: What is tuned.
        trial: The task's trial.
        task: What to do.
        state: What its source gave.
        should_stop: Asked after each epoch.
        on_epoch: Told of each epoch.
    """
    started = time.perf_counter()
    history: History = []
    try:
        problem = replace(problem, seed=task.seed)
        learner = SingleLearner(problem.target(trial), trial.config, problem.objective, problem.max_t)
        if state is not None:
            learner.load(state)
        numbers = [trial.number]
        for epoch, metrics in train_epochs(learner, problem, task.span, trial.batch_size, numbers, should_stop):
            remember_best(learner, problem, epoch, metrics)
            history.append((epoch, {name: values[0] for name, values in metrics.items()}))
            on_epoch(epoch, metrics)
    except Exception:
        return TargetOutcome(task, None, [], traceback.format_exc(), time.perf_counter() - started)
    return TargetOutcome(task, learner.state(), history, None, time.perf_counter() - started)
