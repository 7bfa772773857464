"""Full-size training of `tune` on one or several ranks: what `elastic` runs."""

from __future__ import annotations

import time

from fusion.hyperparameters import read
from fusion.width import keep_freed_memory
from hydro_rasda.contracts import Span
from hydro_rasda.data import Shard
from hydro_rasda.problem import Problem
from hydro_rasda.training.full_size import full_size_learner
from hydro_rasda.training.loop import diverged, good_enough, keep_best, out_of_patience, train_epochs
from hydro_rasda.training.lr_rescaling import Rule
from hydro_rasda.training.report_keys import EPOCH_SECONDS
from hydro_rasda.training.worker import Worker
from hydro_rasda.trial import Trial


def train_full_size(worker: Worker, rule: Rule = "auto") -> None:
    """Train a trial's full-size model from its last checkpoint to `max_t`, or until its loss is not finite.

    `elastic(train_full_size, scheduler, data=problem)` makes it a trainable whose configurations are
    `{"trial": number, "config": {hyperparameters}}`. For another rule, pass `functools.partial(train_full_size,
    rule=...)`. After each epoch it reports `train_*` and `val_*`: means over all examples, the same on every rank. It
    also reports `epoch` (epochs trained), `epoch_seconds` (of this one), `workers`, `global_batch_size` (examples per
    step over all ranks), `lr_multiplier` and `scaling_efficiency`. On several ranks, `gradient_noise_scale` (in
    examples) is added. A checkpoint's state is `SingleLearner.state`'s; one is also saved at the end.

    The configuration's batch is that of the trial's first workers together, so that they train as one process would.
    A rank keeps its batch when workers are added, so that the global batch grows with them (to the nearest whole
    example). The learning rate then follows by the rule, over a warm-up of the configuration's
    `rescale_warmup_epochs`. If the number of steps per epoch is unknown, there is no warm-up.

    Args:
        worker: Its `data` is the `Problem`, which may come from a process with another device.
        rule: How learning rates follow the global batch, see `lr_factor`.
    """
    if worker.device.type == "cpu":
        keep_freed_memory()
    shared: Problem = worker.data
    # Hooks time and rescale steps: a recording calls none.
    (problem,) = shared.on(worker.device).with_settings(graph=False).each("target")
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
        keep_best(learner, problem, epoch, metrics)
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
