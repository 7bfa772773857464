"""Training by epochs: one loop for one model and for K fused ones; a learner says what a step is.

Shapes: K members of a learner (1 for an ordinary module). Metrics are tensors [K].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fusion import lr_factor, optimizer

from .data import Batch, batch_length
from .objective import Objective
from .problem import Problem, Trial
from .seeds import derive_seed, seed_generators

EVAL_BATCH_FACTOR = 4
"""Evaluation keeps no activations for a backward pass, so its batches are this many times larger."""


class Learner(Protocol):
    """K models in training."""

    def train_mode(self, training: bool) -> None:
        """Switch dropout, batch statistics and the like."""
        ...

    def step(self, batch: Batch, epoch: float) -> Mapping[str, Tensor]:
        """Forward, backward, update at a time given in epochs, fractions included; metrics [K] before the update."""
        ...

    def evaluate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Metrics [K], no gradient."""
        ...


class SingleLearner:
    """An ordinary module with an ordinary torch optimizer."""

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        objective: Objective,
        max_t: int,
    ) -> None:
        self.model = model
        self.optimizer = optimizer(model, config)
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._config, self._objective, self._max_t = config, objective, max_t

    def train_mode(self, training: bool) -> None:
        self.model.train(training)

    def step(self, batch: Batch, epoch: float) -> Mapping[str, Tensor]:
        factor = lr_factor(self._config, epoch, self._max_t)
        for group, base in zip(self.optimizer.param_groups, self._base_lrs):
            group["lr"] = base * factor
        metrics = self._objective(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        metrics["loss"].backward()
        max_norm = self._config.get("grad_clip")
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        return _as_vectors(metrics)

    def evaluate(self, batch: Batch) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return _as_vectors(self._objective(self.model, batch))

    def state(self) -> dict[str, Any]:
        """Weights, buffers and optimizer state."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


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
    seed_parts: Sequence[int | str],
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, EpochMetrics]]:
    """Train and validate epoch by epoch.

    Stops before `span.stop` where no member has a finite loss any more, or where `should_stop()` holds after an epoch.

    Args:
        learner: K models.
        problem: Its data.
        span: Which epochs.
        batch_size: Examples per step.
        seed_parts: Tells this learner's random numbers (dropout) from others'.
        should_stop: Asked after each epoch.

    Yields:
        The number of epochs trained, 1 and up, and the metrics of the last.
    """
    steps = problem.train_data.steps(batch_size)
    for epoch in range(span.start, span.stop):
        seed_generators(derive_seed(problem.seed, *seed_parts, epoch))
        learner.train_mode(True)
        train = mean_metrics(
            (learner.step(batch, epoch + (i / steps if steps else 0.0)), batch_length(batch))
            for i, batch in enumerate(problem.train_data.epoch(batch_size, epoch))
        )
        learner.train_mode(False)
        validation = mean_metrics(
            (learner.evaluate(batch), batch_length(batch))
            for batch in problem.val_data.in_order(EVAL_BATCH_FACTOR * batch_size)
        )
        metrics = {f"train_{k}": v for k, v in train.items()} | {f"val_{k}": v for k, v in validation.items()}
        yield epoch + 1, {name: values.tolist() for name, values in metrics.items()}
        if not torch.isfinite(train["loss"]).any() or should_stop():
            return


def mean_metrics(measured: Iterable[tuple[Mapping[str, Tensor], int]]) -> dict[str, Tensor]:
    """Mean over examples, in double precision, without waiting for the device at each step.

    Args:
        measured: For each batch, its mean metrics and its number of examples.
    """
    totals: dict[str, Tensor] = {}
    count = 0
    for metrics, examples in measured:
        count += examples
        for name, value in metrics.items():
            weighted = value.double() * examples
            totals[name] = totals[name] + weighted if name in totals else weighted
    return {name: total / count for name, total in totals.items()}


def train_target(
    problem: Problem,
    trial: Trial,
    span: Span,
    state: Mapping[str, Any] | None,
    should_stop: Callable[[], bool] = lambda: False,
    on_epoch: Callable[[int, EpochMetrics], None] = lambda epoch, metrics: None,
) -> tuple[dict[str, Any], History]:
    """Train one full-size model for a span of epochs.

    Args:
        problem: What is tuned.
        trial: Its configuration.
        span: Which epochs.
        state: What an earlier span returned; None starts from the trial's initial weights.
        should_stop: Asked after each epoch.
        on_epoch: Told of each epoch.

    Returns:
        The state to go on from, and the history: epochs trained with the metrics after each.
    """
    learner = SingleLearner(problem.target(trial), trial.config, problem.objective, problem.max_t)
    if state is not None:
        learner.load(state)
    history: History = []
    for epoch, metrics in train_epochs(learner, problem, span, trial.batch_size, ("target", trial.number), should_stop):
        history.append((epoch, {name: values[0] for name, values in metrics.items()}))
        on_epoch(epoch, metrics)
    return learner.state(), history
