"""Full-size training on several devices of a pool: each device's process is a rank, on either backend."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from fusion.keys import read
from fusion.width import keep_freed_memory
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import EpochMetrics, Outcome, Span, Task
from hydro_rasda.data import Shard
from hydro_rasda.problem.problem import Problem
from hydro_rasda.training.best_weights import epochs_since
from hydro_rasda.training.distributed import Store
from hydro_rasda.training.full_size import full_size_learner
from hydro_rasda.training.loop import diverged, good_enough, keep_best, out_of_patience, train_epochs
from hydro_rasda.training.lr_rescaling import Rule
from hydro_rasda.training.user_loop import Over, SpanWorker, train_own_on_rank
from hydro_rasda.training.worker import Worker
from hydro_rasda.training.worker_reports import EPOCH_SECONDS, HISTORY


def train_full_size(worker: Worker, rule: Rule = "auto") -> None:
    """Train a trial's full-size model from its last checkpoint to `max_t`.

    Training ends earlier if the loss is not finite, if patience runs out, or if `stop_at` is reached.

    `elastic(train_full_size, scheduler, data=problem)` returns a trainable whose configurations are
    `{"trial": number, "config": {hyperparameters}}`. For another learning rate rule, pass
    `functools.partial(train_full_size, rule=...)`.

    After each epoch, the worker reports `train_*` and `val_*`: means over all examples, the same on every rank. It also
    reports `epoch` (epochs trained), `epoch_seconds` (of the last epoch), `workers`, `global_batch_size` (examples per
    step over all ranks), `lr_multiplier` and `scaling_efficiency`. Several ranks also report `gradient_noise_scale` (in
    examples). A checkpoint holds `SingleLearner.state`; the last epoch saves one, too.

    `batch_size` of the configuration is the global batch of the trial's first workers, so that they train as one
    process would. When workers are added, each rank keeps its batch, so that the global batch grows (to the nearest
    whole example). The learning rate is then rescaled by `rule`, over a warm-up of `rescale_warmup_epochs`. If the
    number of steps per epoch is unknown, there is no warm-up.
    """
    if worker.device.type == "cpu":
        keep_freed_memory()
    shared: Problem = worker.data
    # Hooks time and rescale steps: a recording calls none.
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
    span = Span(worker.iteration, problem.settings.max_t)
    began = time.perf_counter()
    for epoch, metrics in train_epochs(learner, problem, span, global_batch_size, [trial.number]):
        metrics = keep_best([learner], problem, epoch, metrics)
        over = diverged(metrics) or out_of_patience(learner, problem, epoch) or good_enough(problem, metrics)
        worker.report(
            {name: values[0] for name, values in metrics.items()}
            | {"epoch": epoch, "global_batch_size": global_batch_size, EPOCH_SECONDS: time.perf_counter() - began},
            learner.state,
            final=epoch == problem.settings.max_t or over,
        )
        if over:
            return
        began = time.perf_counter()


TIMEOUT = timedelta(minutes=30)
"""If the others wait longer than this for a rank, it is taken for dead."""


@dataclass(frozen=True)
class RankPlace:
    """The place of a process among those that train one full-size model.

    Attributes:
        growth: Number of ranks, divided by the number of workers of a new trial.
        through: The backend of torch.distributed. NCCL needs a GPU for each rank.
        carried: The values of `Worker.saved` besides the training state: "rescaled" and "measured".
    """

    shard: Shard
    growth: float
    through: Literal["gloo", "nccl"]
    carried: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def joined(self, open_store: Callable[[], Store]) -> Iterator[None]:
        """Join all ranks to the default process group, for the time of the context.

        After an error the group stays open, because closing it could wait forever for the other ranks. The process must
        not be used again.
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

    Only rank 0's outcome has a checkpoint and a history.
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
