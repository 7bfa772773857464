"""Train one trial at full size on a device, from one milestone to the next."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import EpochMetrics, History, Outcome, Span, Task
from hydro_rasda.data import ALONE, Shard
from hydro_rasda.history.history import FULL_TRAINING
from hydro_rasda.history.lines import EpochTold
from hydro_rasda.problem.precision import loss_scale
from hydro_rasda.problem.problem import Problem
from hydro_rasda.training.cuda_graphs import records, with_graphs
from hydro_rasda.training.folds_and_repeats import over_models
from hydro_rasda.training.loop import diverged, good_enough, keep_best, out_of_patience, train_epochs
from hydro_rasda.training.single_learner import SingleLearner
from hydro_rasda.training.user_loop import train_own


def full_size_learner(problem: Problem, trial: Trial, shard: Shard = ALONE) -> SingleLearner:
    """Return the learner of a trial's full-size model, for one rank or for one of several."""
    settings, model = problem.settings, problem.target(trial)
    ema = settings.race.ema if settings.race.keep == "best" else 0.0
    scale = loss_scale(settings.precision, 1, problem.device)
    how: dict[str, Any] = {"graph": records(problem), "scale": scale, "sharded": settings.race.strategy == "fsdp"}
    return SingleLearner(model, trial.config, problem.objective, problem.horizon or settings.max_t, shard, ema, **how)


def told_of(task: Task, epoch: int, metrics: EpochMetrics) -> list[EpochTold]:
    """Return the journal entry for an epoch of a trial of the race; an empty list for any other task."""
    if FULL_TRAINING.fullmatch(task.key) is None:
        return []
    return [(task.number, epoch, {name: values[0] for name, values in metrics.items()})]


def states_together(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the checkpoint of a trial from the states of its models."""
    first = dict(states[0])
    if len(states) == 1:
        return first
    best = {"best": {name: first["best"][name] for name in ("epoch", "score")}} if "best" in first else {}
    return {"models": list(states), **best}


def states_apart(state: Mapping[str, Any], models: int) -> Sequence[Mapping[str, Any]]:
    """Return the states of a trial's models from its checkpoint."""
    found: Sequence[Mapping[str, Any]] = [state] if models == 1 else state["models"]
    return found


def _epochs(
    learners: Sequence[SingleLearner],
    each: Sequence[Problem],
    span: Span,
    trial: Trial,
    should_stop: Callable[[], bool],
) -> Iterator[tuple[int, EpochMetrics]]:
    """Train each of a trial's models by one epoch, in turn; yield the epoch and the mean metrics over the models."""
    stops = should_stop if len(learners) == 1 else lambda: False
    apart = [
        train_epochs(learner, of_model, span, trial.batch_size, [trial.number], stops)
        for learner, of_model in zip(learners, each, strict=True)
    ]
    if len(apart) == 1:
        yield from apart[0]
        return
    for epochs in zip(*apart):
        found = [metrics for _, metrics in epochs]
        values = {name: [value for metrics in found for value in metrics[name]] for name in found[0]}
        means = over_models(values, len(found), each[0].settings)
        yield epochs[0][0], means
        if should_stop() or diverged(means):
            return


def train_full_size_trial(
    problem: Problem,
    trial: Trial,
    task: Task,
    state: Mapping[str, Any] | None,
    should_stop: Callable[[], bool] = lambda: False,
    on_epoch: Callable[[int, EpochMetrics], None] = lambda epoch, metrics: None,
) -> Outcome:
    """Train a trial's full-size model for a span of epochs; several models of a trial take turns, epoch by epoch."""
    started = time.perf_counter()

    def train(problem: Problem) -> Outcome:
        history: History = []
        each = problem.each("race")
        learners = [full_size_learner(of_model, trial) for of_model in each]
        for learner, own in zip(learners, states_apart(state, len(each)) if state is not None else ()):
            learner.load(own)
        # Patience may have run out in a process that ended before it could report this. Then nothing is left to train.
        ended = state is not None and out_of_patience(learners[0], problem, task.span.start)
        span = Span(task.span.start, task.span.start) if ended else task.span
        for epoch, metrics in _epochs(learners, each, span, trial, should_stop):
            metrics = keep_best(learners, problem, epoch, metrics)
            history.append((epoch, {name: values[0] for name, values in metrics.items()}))
            on_epoch(epoch, metrics)
            ended = out_of_patience(learners[0], problem, epoch)
            if ended or good_enough(problem, metrics):
                break
        reached = states_together([learner.state() for learner in learners])
        return Outcome.of_model(trial.number, reached, history, time.perf_counter() - started, ended=ended)

    def train_again(problem: Problem) -> Outcome:
        learner = full_size_learner(problem, trial)
        for epoch, metrics in train_epochs(learner, problem, task.span, trial.batch_size, [trial.number]):
            on_epoch(epoch, {problem.settings.metric: []})
            if diverged(metrics):
                raise FloatingPointError(f"the training loss of epoch {epoch} is not finite")
        learner.remember(task.span.stop, 0.0, problem.settings.mode, averaged=task.averaged)
        return Outcome.of_model(trial.number, learner.state(), [], time.perf_counter() - started, ended=True)

    try:
        problem = problem.at_full_size(task.seed, task.horizon)
        if task.refit:
            return with_graphs(train_again, problem.on_all_examples())
        if problem.own_loop is not None:
            return train_own(problem, trial, task, state, should_stop, on_epoch)
        return with_graphs(train, problem)
    except (Exception, SystemExit):
        return Outcome.failed(trial.number, traceback.format_exc(), time.perf_counter() - started)
