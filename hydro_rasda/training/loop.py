"""Training by epochs: one loop for one model, for one on several ranks and for K fused ones; a learner says what a
step is.

Shapes: K members of a learner (1 for an ordinary module). Metrics are tensors [K].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from hydro_rasda.contracts import EpochMetrics, Span
from hydro_rasda.data import ALONE, Shard, Share
from hydro_rasda.metrics import EVAL_BATCH_FACTOR, add_over_ranks, means, summed
from hydro_rasda.problem import Problem
from hydro_rasda.seeds import derive_seed
from hydro_rasda.training.learners import Learner, SingleLearner


def train_epochs(
    learner: Learner,
    problem: Problem,
    span: Span,
    batch_size: int,
    numbers: Sequence[int],
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, EpochMetrics]]:
    """Train and validate epoch by epoch.

    Stops before `span.stop` where no member has a finite loss any more, or where `should_stop()` holds after an epoch.

    Args:
        learner: K models.
        problem: Its data.
        span: Which epochs.
        batch_size: Examples per step.
        numbers: Of the K trials. In each epoch, a trial draws the same random numbers (dropout) as any model of that
            trial, whatever the other members are.
        should_stop: Asked after each epoch.

    Yields:
        The number of epochs trained, 1 and up, and the metrics of the last.
    """

    def step(share: Share, epoch: float, steps: float) -> Mapping[str, Tensor]:
        return learner.step(share.batch, epoch, steps)

    for epoch, metrics in _epochs(learner, step, problem, span, batch_size, numbers, ALONE):
        yield epoch, metrics
        if should_stop():
            return


def train_epochs_on_ranks(
    learner: SingleLearner, problem: Problem, span: Span, batch_size: int, number: int
) -> Iterator[tuple[int, EpochMetrics]]:
    """The same for one model, of which each rank learns and validates its share.

    Every rank calls it; all yield the same metrics, exact means over all examples, and stop together. The model learns
    as in one process with the same batch size, apart from what depends on a rank's share alone: random numbers of the
    model, and BatchNorm's statistics, of which those of rank 0 are kept. One rank is `train_epochs`.

    Args:
        learner: The model, and which rank this is.
        problem: Its data, the same on all ranks.
        span: Which epochs.
        batch_size: Examples per step, over all ranks.
        number: Of the trial. Rank 0 draws random numbers as one process does, the others their own.

    Yields:
        As `train_epochs`.
    """

    def step(share: Share, epoch: float, steps: float) -> Mapping[str, Tensor]:
        return learner.step(share.batch, epoch, steps, share.weight)

    yield from _epochs(learner, step, problem, span, batch_size, [number], learner.shard)


def _epochs(
    learner: Learner,
    step: Callable[[Share, float, float], Mapping[str, Tensor]],
    problem: Problem,
    span: Span,
    batch_size: int,
    numbers: Sequence[int],
    shard: Shard,
) -> Iterator[tuple[int, EpochMetrics]]:
    steps = problem.train_data.steps(batch_size)
    own_seed = ("rank", shard.rank) if shard.rank else ()
    for epoch in range(span.start, span.stop):
        learner.seed([derive_seed(problem.settings.seed, "trial", number, epoch, *own_seed) for number in numbers])
        learner.train_mode(True)
        train = summed(
            (step(share, epoch + (i / steps if steps else 0.0), steps or 1), share.examples)
            for i, share in enumerate(problem.train_data.shares(batch_size, epoch, shard))
        )
        learner.train_mode(False)
        validation = summed(
            (learner.evaluate(share.batch), share.examples)
            for share in problem.val_data.shares(EVAL_BATCH_FACTOR * batch_size, None, shard)
        )
        if shard.world > 1:
            add_over_ranks([train, validation])
        metrics = {f"train_{k}": v for k, v in means(train).items()}
        metrics |= {f"val_{k}": v for k, v in means(validation).items()}
        values: EpochMetrics = {name: mean.tolist() for name, mean in metrics.items()}
        yield epoch + 1, values
        if diverged(values):
            return


def remember_best(learner: SingleLearner, problem: Problem, epoch: int, metrics: EpochMetrics) -> None:
    """Keep the weights of the best epoch of a full-size training, where that is what counts."""
    if problem.settings.keep == "best" and not diverged(metrics):
        learner.remember(epoch, metrics[problem.settings.metric][0], problem.settings.mode)


def diverged(metrics: EpochMetrics) -> bool:
    """Whether no member has a finite training loss any more."""
    return not any(math.isfinite(loss) for loss in metrics["train_loss"])
