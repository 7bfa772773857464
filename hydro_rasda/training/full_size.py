"""One trial at full size: what a device does with it between two milestones."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from hydro_rasda.contracts import EpochMetrics, FullSizeOutcome, FullSizeTask, History, Span
from hydro_rasda.data import ALONE, Shard
from hydro_rasda.precision import loss_scale
from hydro_rasda.problem import Problem
from hydro_rasda.training.learners import SingleLearner
from hydro_rasda.training.loop import good_enough, keep_best, out_of_patience, train_epochs
from hydro_rasda.training.recorded_steps import records, with_graphs
from hydro_rasda.training.user_loop import train_own
from hydro_rasda.trial import Trial


def full_size_learner(problem: Problem, trial: Trial, shard: Shard = ALONE) -> SingleLearner:
    """A trial's full-size model, to be trained on one rank or several."""
    settings, model = problem.settings, problem.target(trial)
    ema = settings.race.ema if settings.race.keep == "best" else 0.0
    scale = loss_scale(settings.precision, 1, problem.device)
    how: dict[str, Any] = {"graph": records(problem), "scale": scale, "sharded": settings.race.strategy == "fsdp"}
    return SingleLearner(model, trial.config, problem.objective, problem.horizon or settings.max_t, shard, ema, **how)


def train_full_size_trial(
    problem: Problem,
    trial: Trial,
    task: FullSizeTask,
    state: Mapping[str, Any] | None,
    should_stop: Callable[[], bool] = lambda: False,
    on_epoch: Callable[[int, EpochMetrics], None] = lambda epoch, metrics: None,
) -> FullSizeOutcome:
    """Train one full-size model for a span of epochs.

    Args:
        state: The state of the checkpoint that training continues from.
    """
    started = time.perf_counter()

    def train(problem: Problem) -> FullSizeOutcome:
        history: History = []
        learner = full_size_learner(problem, trial)
        if state is not None:
            learner.load(state)
        numbers = [trial.number]
        # One whose process ended before that was told is over already.
        ended = state is not None and out_of_patience(learner, problem, task.span.start)
        span = Span(task.span.start, task.span.start) if ended else task.span
        for epoch, metrics in train_epochs(learner, problem, span, trial.batch_size, numbers, should_stop):
            keep_best(learner, problem, epoch, metrics)
            history.append((epoch, {name: values[0] for name, values in metrics.items()}))
            on_epoch(epoch, metrics)
            ended = out_of_patience(learner, problem, epoch)
            if ended or good_enough(problem, metrics):
                break
        return FullSizeOutcome(task, learner.state(), history, None, time.perf_counter() - started, ended=ended)

    try:
        problem = problem.at_full_size(task.seed, task.horizon)
        if problem.full_size is not None:
            return train_own(problem, trial, task, state, should_stop, on_epoch)
        return with_graphs(train, problem)
    except (Exception, SystemExit):
        return FullSizeOutcome(task, None, [], traceback.format_exc(), time.perf_counter() - started)
