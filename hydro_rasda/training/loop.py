"""The training loop by epochs, for one model, for a model on several ranks and for K fused models.

A learner defines what a step does.

Shapes: K members of a learner (1 for an ordinary module). Metrics are tensors [K].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

from torch import Tensor

from fusion.evaluate.microbatch import Sums
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.contracts import EpochMetrics, Span
from hydro_rasda.data import EVAL_BATCH_FACTOR, Share
from hydro_rasda.problem.metrics import Collected, add_over_ranks, of_members
from hydro_rasda.problem.precision import matrix_products
from hydro_rasda.problem.problem import Problem
from hydro_rasda.settings.config import TuneConfig, averaged, unaveraged
from hydro_rasda.training.folds_and_repeats import named, over_models, shares_of
from hydro_rasda.training.fused_learner import FusedLearner
from hydro_rasda.training.single_learner import Learner, SingleLearner


def train_epochs(
    learner: Learner,
    problem: Problem,
    span: Span,
    batch_size: int,
    numbers: Sequence[int],
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, EpochMetrics]]:
    """Train and validate epoch by epoch.

    Training ends before `span.stop` if no member has a finite loss, or if `should_stop()` is true after an epoch.

    On several ranks, every rank calls this function, and trains and validates on its share of the data. All ranks stop
    together and yield the same metrics, which are exact means over all examples. The model learns as in one process
    with the same batch size, with two exceptions. Each rank draws its own random numbers, and BatchNorm normalizes by
    the rank's share of a batch. BatchNorm's running statistics are means over the ranks.

    Args:
        learner: K models, or one rank of a single model. If a trial trains several models in the sweep, they lie side
            by side.
        batch_size: Examples per step, over all ranks.
        numbers: The numbers of the K trials. They seed the random numbers (dropout) of an epoch, which therefore do not
            depend on the other members of a group. Rank 0 draws the same numbers as a single process.
        should_stop: Called after each epoch; on several ranks, it must return the same on all ranks.

    Yields:
        The number of epochs trained, from 1, and the metrics of the last epoch: for each trial, means over its models.
    """
    steps, shard, each = problem.train_data.steps(batch_size), learner.shard, problem.each("sweep")
    own_seed = ("rank", shard.rank) if shard.rank else ()
    for epoch in range(span.start, span.stop):
        learner.seed([derive_seed(p.settings.seed, "trial", n, epoch, *own_seed) for n in numbers for p in each])
        learner.train_mode(True)
        train = Sums()
        with matrix_products(problem.settings.precision):
            for i, share in enumerate(shares_of(each, batch_size, epoch, shard)):
                train.add(learner.step(share, epoch + (i / steps if steps else 0.0), steps or 1), share.examples)
        values = _validated(learner, problem, batch_size)
        if shard.world > 1:
            add_over_ranks(train)
        values = over_models({**named("train", train), **values}, len(each), problem.settings)
        if learner.averages and epoch + 1 in problem.settings.race_milestones:
            own = _validated(learner, problem, batch_size, averaged=False)
            values |= {unaveraged(name): of_each for name, of_each in own.items()}
        yield epoch + 1, values
        if should_stop() or diverged(values):
            return


def keep_best(learners: Sequence[SingleLearner], problem: Problem, epoch: int, metrics: EpochMetrics) -> EpochMetrics:
    """Remember the weights of this epoch of a full-size training, if `race.keep` is "best" and `bettered` chooses it.

    Args:
        learners: The learners of a trial's models.
        metrics: The metrics that `train_epochs` yields: means over the trial's models.

    Returns:
        The metrics of the weights that count: the averaged weights or the last step's. The compared metrics of the
        other weights are added, under names from `unaveraged` or `averaged`.
    """
    settings = problem.settings
    metrics = _of_better_weights(metrics, settings, epoch == settings.max_t)
    if settings.race.keep == "best" and not diverged(metrics):
        score, is_average = metrics[settings.metric][0], averaged(settings.metric) not in metrics
        for learner in learners:
            learner.remember(epoch, score, settings.mode, averaged=is_average)
    return metrics


def _of_better_weights(metrics: EpochMetrics, settings: TuneConfig, at_end: bool) -> EpochMetrics:
    """Return the metrics of averaged weights; at the end, return those of the last step's weights if they are better.

    Averaged weights lag behind while a model still improves. At earlier epochs the averages count in any case, because
    a choice among more candidates would depend more on luck.
    """
    own = {name: metrics[unaveraged(name)] for name in metrics if unaveraged(name) in metrics}
    known = {name: value for name, value in metrics.items() if name not in map(unaveraged, own)}
    compared = [name for name in settings.comparison.trained if name in own]
    if at_end and settings.metric in own and not settings.comparison.by_place:
        sign = 1.0 if settings.mode == "max" else -1.0
        ours, theirs = (sign * of[settings.metric][0] for of in (own, known))
        # If both scores are equal, the averages count. If only theirs is NaN, the last step's weights count.
        if math.isfinite(ours) and not theirs >= ours:
            return known | own | {averaged(name): known[name] for name in compared}
    return known | {unaveraged(name): own[name] for name in compared}


def _validated(learner: Learner, problem: Problem, batch_size: int, averaged: bool = True) -> EpochMetrics:
    """Return the validation metrics over all ranks; `averaged` is as in `Learner.evaluating`.

    With folds, each model of a trial is validated on its own examples.
    """
    each, shard = problem.each("sweep") if problem.folds is not None else [problem], learner.shard
    sums, collected = [Sums() for _ in each], [Collected() for _ in each]
    data = [own.val_data.shares(EVAL_BATCH_FACTOR * batch_size, None, shard) for own in each]
    with learner.evaluating(averaged), matrix_products(problem.settings.precision):
        for shares in zip_longest(*data):
            for at, (share, metrics) in enumerate(zip(shares, _evaluated(learner, shares), strict=True)):
                if metrics is not None:
                    means = metrics if problem.metrics is None else collected[at].take(metrics, share.examples)
                    sums[at].add(means, share.examples)
    values = []
    for of_model, outputs in zip(sums, collected, strict=True):
        if shard.world > 1:
            add_over_ranks(of_model)
        values.append(named("val", of_model))
        if problem.metrics is not None:
            everywhere, loss = outputs.over_ranks(shard.world), values[-1]["val_loss"]
            whole = of_members(problem.metrics, everywhere, loss, problem.whole_names)
            values[-1] |= {f"val_{name}": of_each for name, of_each in whole.items()}
    trials = {name: zip(*(own[name] for own in values), strict=True) for name in values[0]}
    return {name: [value for of_trial in of_each for value in of_trial] for name, of_each in trials.items()}


def _evaluated(learner: Learner, shares: Sequence[Share | None]) -> Sequence[Mapping[str, Tensor] | None]:
    """Return the metrics of all models on a single share. With several shares, model `i` of each trial uses share `i`.

    None stands for a model that has no share left.
    """
    batches = [None if share is None else share.batch for share in shares]
    if len(batches) == 1:
        return [learner.evaluate(batches[0])]
    assert isinstance(learner, FusedLearner)
    return learner.evaluate_apart(batches)


def diverged(metrics: EpochMetrics) -> bool:
    """Tell whether no member has a finite training loss any more."""
    return not any(math.isfinite(loss) for loss in metrics["train_loss"])
