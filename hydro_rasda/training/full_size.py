"""Train one trial at full size: on a device, or on several devices of a pool, where each device's process is a rank."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from fusion.keys import read
from fusion.width import keep_freed_memory
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import EpochMetrics, History, Outcome, Span, Task
from hydro_rasda.data import ALONE, Shard
from hydro_rasda.history.history import FULL_TRAINING
from hydro_rasda.history.lines import EpochTold
from hydro_rasda.problem.precision import loss_scale
from hydro_rasda.problem.problem import Problem
from hydro_rasda.settings.config import HISTORY
from hydro_rasda.training.best_weights import epochs_since
from hydro_rasda.training.cuda_graphs import records, with_graphs
from hydro_rasda.training.distributed import Store
from hydro_rasda.training.folds_and_repeats import over_models
from hydro_rasda.training.loop import diverged, keep_best, train_epochs
from hydro_rasda.training.lr_rescaling import Rule
from hydro_rasda.training.single_learner import SingleLearner
from hydro_rasda.training.user_loop import Over, SpanWorker, train_own, train_own_on_rank
from hydro_rasda.training.worker import Worker
from hydro_rasda.training.worker_reports import EPOCH_SECONDS


def full_size_learner(problem: Problem, trial: Trial, shard: Shard = ALONE) -> SingleLearner:
    """Return the learner of a trial's full-size model, for a single process or for one of several ranks."""
    settings, model = problem.settings, problem.target(trial)
    ema = settings.race.ema if settings.race.keep == "best" else 0.0
    scale = loss_scale(settings.precision, 1, problem.device)
    how: dict[str, Any] = {"graph": records(problem), "scale": scale, "sharded": settings.race.strategy == "fsdp"}
    return SingleLearner(model, trial.config, problem.objective, problem.horizon or settings.max_t, shard, ema, **how)


def told_of(task: Task, epoch: int, metrics: EpochMetrics) -> list[EpochTold]:
    """Return a list with the journal's entry for an epoch, if the task is one of the race; else an empty list."""
    if FULL_TRAINING.fullmatch(task.key) is None:
        return []
    return [(task.number, epoch, {name: values[0] for name, values in metrics.items()})]


def states_together(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of a trial's models into the trial's checkpoint; `states_apart` splits it again."""
    first = dict(states[0])
    if len(states) == 1:
        return first
    best = {"best": {name: first["best"][name] for name in ("epoch", "score")}} if "best" in first else {}
    return {"models": list(states), **best}


def states_apart(state: Mapping[str, Any], models: int) -> Sequence[Mapping[str, Any]]:
    """Split a trial's checkpoint into the states of its models, whose number is `models`."""
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
    """Train a trial's full-size model for a span of epochs; several models of a trial take turns, epoch by epoch.

    `state` is the checkpoint from which the training continues; None to begin anew.
    """
    started = time.perf_counter()

    def train(problem: Problem) -> Outcome:
        history: History = []
        each, settings = problem.each("race"), problem.settings
        learners = [full_size_learner(of_model, trial) for of_model in each]
        for learner, own in zip(learners, states_apart(state, len(each)) if state is not None else ()):
            learner.load(own)
        # Patience may have run out in an earlier process that ended before it reported so. Then no epoch is left.
        ended = state is not None and settings.out_of_patience(learners[0].epochs_since_best(task.span.start))
        span = Span(task.span.start, task.span.start) if ended else task.span
        for epoch, metrics in _epochs(learners, each, span, trial, should_stop):
            metrics = keep_best(learners, problem, epoch, metrics)
            history.append((epoch, {name: values[0] for name, values in metrics.items()}))
            on_epoch(epoch, metrics)
            ended = settings.out_of_patience(learners[0].epochs_since_best(epoch))
            if ended or settings.good_enough(metrics[settings.metric][0]):
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


def train_full_size(worker: Worker, rule: Rule = "auto") -> None:
    """Train a trial's full-size model from its last checkpoint to `max_t`.

    Training ends earlier if the loss is not finite, if patience runs out, or if `stop_at` is reached. The worker's data
    are the problem, and its configuration is `{"trial": number, "config": {hyperparameters}}`. After each epoch, the
    worker reports the metrics of `train_epochs` and the keys of `HISTORY`, with `SingleLearner.state` as its state.

    `batch_size` of the configuration is the global batch of the trial's first workers, so that they train as one
    process would. When workers are added, each rank keeps its batch, so that the global batch grows (to the nearest
    whole example). The learning rate is then rescaled by `rule`, over a warm-up of `rescale_warmup_epochs`. If the
    number of steps per epoch is unknown, there is no warm-up.
    """
    if worker.device.type == "cpu":
        keep_freed_memory()
    shared: Problem = worker.data
    # Steps are not recorded as CUDA graphs, because these would not call the hooks that time steps and rescale rates.
    (problem,) = shared.on(worker.device).with_settings(graph=False).each("race")
    trial = Trial(worker.config["trial"], worker.config["config"])
    shard = Shard(worker.rank, worker.world_size)
    learner = full_size_learner(problem, trial, shard)
    if worker.checkpoint is not None:
        learner.load(worker.checkpoint)
    global_batch_size = max(1, round(trial.batch_size * worker.growth))
    steps = problem.train_data.steps(global_batch_size) or 0
    warmup_epochs = read(trial.config, "rescale_warmup_epochs")
    worker.rescale(learner.optimizer, rule, round(warmup_epochs * steps))
    worker.gathers = learner.sharded
    learner.noise = worker.measure(learner.joint, learner.optimizer)
    settings = problem.settings
    span = Span(worker.iteration, settings.max_t)
    began = time.perf_counter()
    for epoch, metrics in train_epochs(learner, problem, span, global_batch_size, [trial.number]):
        metrics = keep_best([learner], problem, epoch, metrics)
        patience_is_over = settings.out_of_patience(learner.epochs_since_best(epoch))
        over = diverged(metrics) or patience_is_over or settings.good_enough(metrics[settings.metric][0])
        worker.report(
            {name: values[0] for name, values in metrics.items()}
            | {"epoch": epoch, "global_batch_size": global_batch_size, EPOCH_SECONDS: time.perf_counter() - began},
            learner.state,
            final=epoch == settings.max_t or over,
        )
        if over:
            return
        began = time.perf_counter()


TIMEOUT = timedelta(minutes=30)
"""A rank counts as dead if the other ranks wait longer than this for it."""


@dataclass(frozen=True)
class RankPlace:
    """The place of a process among those that train one full-size model.

    Attributes:
        growth: Number of ranks, divided by the number of workers with which trials start; at least 1.
        through: The backend of torch.distributed. NCCL needs a GPU for each rank.
        carried: The values of `Worker.saved` besides the training state: "rescaled" and "measured".
    """

    shard: Shard
    growth: float
    through: Literal["gloo", "nccl"]
    carried: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def joined(self, open_store: Callable[[], Store]) -> Iterator[None]:
        """Within the context, let this rank belong to the default process group of all ranks.

        After an error the group stays open, because closing it could wait forever for the other ranks. The process must
        not be used again after an error.
        """
        if self.shard.world == 1:
            yield
            return
        rank, world = self.shard.rank, self.shard.world
        dist.init_process_group(self.through, store=open_store(), rank=rank, world_size=world, timeout=TIMEOUT)
        yield
        dist.destroy_process_group()


def train_target_on_ranks(
    problem: Problem,
    trial: Trial,
    task: Task,
    state: Mapping[str, Any] | None,
    place: RankPlace,
    open_store: Callable[[], Store],
    should_stop: Callable[[], bool],
    on_epoch: Callable[[int, EpochMetrics], None],
) -> Outcome:
    """Train one full-size model for a span of epochs, as one of several ranks; each rank calls it.

    `state` is the checkpoint from which the training continues; None to begin anew. Only rank 0's outcome has a
    checkpoint and a history.
    """
    started = time.perf_counter()
    own_loop = problem.own_loop is not None
    try:
        problem = problem.at_full_size(task.seed, task.horizon)
        worker = SpanWorker(problem, trial, task, state, should_stop, on_epoch, place.shard, place.carried, HISTORY)
        worker.growth = place.growth
        with place.joined(open_store):
            with contextlib.suppress(Over):
                if own_loop:
                    train_own_on_rank(worker)
                else:
                    train_full_size(worker, problem.settings.race.lr_rule)
            reached = worker.reached(state)
    except (Exception, SystemExit):
        return Outcome.failed(trial.number, traceback.format_exc(), time.perf_counter() - started)
    more = {name: value for name, value in worker.saved(None).items() if name in ("rescaled", "measured") and value}
    seconds = time.perf_counter() - started
    if worker.rank:
        return Outcome([], {}, {}, seconds)
    since_best = epochs_since((reached or {}).get("best"), worker.iteration)
    ended = not worker.left if own_loop else problem.settings.out_of_patience(since_best)
    return Outcome.of_model(trial.number, reached, worker.history, seconds, ended=ended, more=more)
