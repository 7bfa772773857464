"""Training by epochs: one loop for one model, for one on several ranks and for K fused ones; a learner says what a
step is.

Shapes: K members of a learner (1 for an ordinary module). Metrics are tensors [K].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion import lr_factor, optimizer
from fusion.keys import read
from fusion.streams import seed_generators

from .config import Mode
from .data import ALONE, Batch, Shard, Share
from .objective import Objective
from .problem import Problem
from .schedulers import rank
from .seeds import derive_seed

EVAL_BATCH_FACTOR = 4
"""Evaluation keeps no activations for a backward pass, so its batches are this many times larger."""


class Learner(Protocol):
    """K models in training."""

    def seed(self, seeds: Sequence[int]) -> None:
        """Say which random numbers (dropout) each model draws from now on: K seeds."""
        ...

    def train_mode(self, training: bool) -> None:
        """Switch dropout, batch statistics and the like."""
        ...

    def step(self, batch: Batch, epoch: float, steps: float) -> Mapping[str, Tensor]:
        """Forward, backward, update at a time given in epochs, fractions included; metrics [K] before the update.

        `steps` is how many an epoch has, 1 where that is not known.
        """
        ...

    def evaluate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Metrics [K], no gradient."""
        ...


class SingleLearner:
    """An ordinary module with an ordinary torch optimizer, on one rank or several.

    Args:
        model: On its device, with the same weights on all ranks.
        config: Its hyperparameters.
        objective: What it does with a batch.
        max_t: Epochs of a full training, the horizon of schedules.
        shard: Which rank this is; the default process group holds as many as there are.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        objective: Objective,
        max_t: int,
        shard: Shard = ALONE,
    ) -> None:
        self.model, self.shard = model, shard
        self.optimizer = optimizer(model, config)
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._config, self._objective, self._max_t = config, objective, max_t
        self._best: dict[str, Any] | None = None
        self._joint: nn.Module | None = None
        if shard.world > 1:
            # Which parameters a step uses may differ from step to step, as with stochastic depth.
            self._joint = DistributedDataParallel(_Joint(model, objective), find_unused_parameters=True)

    def seed(self, seeds: Sequence[int]) -> None:
        """What one model draws comes from the global generators."""
        (seed,) = seeds
        seed_generators(seed)

    def train_mode(self, training: bool) -> None:
        self.model.train(training)
        if self._joint is not None and not training:
            # Rank 0's are what is saved, so they are what is measured.
            for buffer in self.model.buffers():
                whole = buffer.contiguous()
                dist.broadcast(whole, 0)
                buffer.copy_(whole)

    def step(self, batch: Batch, epoch: float, steps: float, weight: float = 1.0) -> Mapping[str, Tensor]:
        """See `Learner`; on several ranks, of this rank's share.

        Args:
            batch: What to learn from.
            epoch: The time.
            steps: How many an epoch has.
            weight: Of the share in the ranks' average, see `data.Part`; alone it is always 1.
        """
        factor = lr_factor(self._config, epoch, self._max_t, steps)
        for group, base in zip(self.optimizer.param_groups, self._base_lrs):
            group["lr"] = base * factor
        if self._joint is None:
            metrics = self._objective(self.model, batch)
            loss = metrics["loss"]
        else:
            metrics = self._joint(batch)
            loss = metrics["loss"] * weight
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        max_norm = read(self._config, "grad_clip")
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        return _as_vectors(metrics)

    def evaluate(self, batch: Batch) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return _as_vectors(self._objective(self.model, batch))

    def remember(self, epoch: int, score: float, mode: Mode) -> None:
        """Have `state` hold, as "best", a copy of these weights and buffers until an epoch scores better.

        Args:
            epoch: How many are trained.
            score: The metric after them; one that is not finite is never the best.
            mode: Whether less or more of it is better.
        """
        scores = [math.nan if self._best is None else self._best["score"], score]
        if rank(scores, mode)[0] == 1:
            self._best = {"epoch": epoch, "score": score, "model": copy.deepcopy(self.model.state_dict())}

    def state(self) -> dict[str, Any]:
        """Weights, buffers and optimizer state; the same on all ranks, whose buffers are rank 0's after `evaluate`.

        Where epochs are remembered, "best" is the best of them: "epoch", "score", "model".
        """
        best = {} if self._best is None else {"best": self._best}
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **best}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, under the hyperparameters that this learner was made with."""
        self.model.load_state_dict(state["model"])
        self._best = state.get("best")
        own = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": own})


class _Joint(nn.Module):
    """Model and objective as one module: DDP follows what happens in a forward pass, objectives included."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective = objective
        some = next(p for p in model.parameters() if p.requires_grad)
        # DDP looks for unused parameters, and prints that it looked in vain where it finds none.
        self.unused = nn.Parameter(torch.zeros((), dtype=some.dtype, device=some.device))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return dict(self._objective(self.model, batch))  # in other mappings, DDP sees no tensors


def _as_vectors(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().reshape(1) for name, value in metrics.items()}


@dataclass(frozen=True)
class Span:
    """The part of a training that a unit of work covers.

    Attributes:
        start: Epochs trained before.
        stop: Epochs trained after.
    """

    start: int
    stop: int


EpochMetrics = dict[str, list[float]]
"""Per metric, "train_*" and "val_*", one value for each member."""

History = list[tuple[int, dict[str, float]]]
"""Of one trial: epochs trained, with the metrics after each."""


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
        learner.seed([derive_seed(problem.seed, "trial", number, epoch, *own_seed) for number in numbers])
        learner.train_mode(True)
        train = _sums(
            (step(share, epoch + (i / steps if steps else 0.0), steps or 1), share.examples)
            for i, share in enumerate(problem.train_data.shares(batch_size, epoch, shard))
        )
        learner.train_mode(False)
        validation = _sums(
            (learner.evaluate(share.batch), share.examples)
            for share in problem.val_data.shares(EVAL_BATCH_FACTOR * batch_size, None, shard)
        )
        if shard.world > 1:
            _add_over_ranks([train, validation])
        metrics = {f"train_{k}": v for k, v in _means(train).items()}
        metrics |= {f"val_{k}": v for k, v in _means(validation).items()}
        values: EpochMetrics = {name: mean.tolist() for name, mean in metrics.items()}
        yield epoch + 1, values
        if diverged(values):
            return


def remember_best(learner: SingleLearner, problem: Problem, epoch: int, metrics: EpochMetrics) -> None:
    """Keep the weights of the best epoch of a full-size training, where that is what counts."""
    if problem.keep == "best" and not diverged(metrics):
        learner.remember(epoch, metrics[problem.metric][0], problem.mode)


def diverged(metrics: EpochMetrics) -> bool:
    """Whether no member has a finite training loss any more."""
    return not any(math.isfinite(loss) for loss in metrics["train_loss"])


def mean_metrics(measured: Iterable[tuple[Mapping[str, Tensor], int]]) -> dict[str, Tensor]:
    """Mean over examples, in double precision, without waiting for the device at each step.

    Args:
        measured: For each batch, its mean metrics and its number of examples.
    """
    return _means(_sums(measured))


@dataclass
class _Sums:
    """Metrics summed over examples, in double precision; `count` examples."""

    totals: dict[str, Tensor]
    count: int


def _sums(measured: Iterable[tuple[Mapping[str, Tensor], int]]) -> _Sums:
    sums = _Sums({}, 0)
    for metrics, examples in measured:
        sums.count += examples
        for name, value in metrics.items():
            # A filler's metrics count nothing, not even where they are not finite.
            weighted = value.double() * examples if examples else torch.zeros_like(value, dtype=torch.float64)
            sums.totals[name] = sums.totals[name] + weighted if name in sums.totals else weighted
    return sums


def _means(sums: _Sums) -> dict[str, Tensor]:
    return {name: total / sums.count for name, total in sums.totals.items()}


def _add_over_ranks(parts: Sequence[_Sums]) -> None:
    """Replace sums over a rank's examples by those over all ranks', in one exchange."""
    device = next(iter(parts[0].totals.values())).device
    own = [torch.tensor([float(sums.count) for sums in parts], dtype=torch.float64, device=device)]
    own += [sums.totals[name] for sums in parts for name in sorted(sums.totals)]
    joined = torch.cat(own)
    dist.all_reduce(joined)
    values = iter(joined.split([len(own[0])] + [len(total) for total in own[1:]]))
    for sums, count in zip(parts, next(values).tolist()):
        sums.count = int(count)
    for sums in parts:
        for name in sorted(sums.totals):
            sums.totals[name] = next(values)
