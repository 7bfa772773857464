"""Record the training steps of learners as CUDA graphs, or compile them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar
from weakref import WeakMethod

from torch import Tensor, nn

from fusion import FusedOptimizer, GraphedStep
from fusion.evaluate.backoff import back_off
from fusion.graph import can_record
from hydro_rasda.data import Batch
from hydro_rasda.problem.problem import Problem

Result = TypeVar("Result")


def records(problem: Problem) -> bool:
    """Tell whether settings and device allow CUDA graphs of training steps. An obstacle may still be found later."""
    return problem.settings.graph is not False and can_record(problem.device)


def with_graphs(train: Callable[[Problem], Result], problem: Problem) -> Result:
    """Return `train(problem)`. If it runs out of memory with recorded steps (CUDA graphs), train without recording."""
    (result,) = back_off(train, problem, records, lambda asked: [asked.with_settings(graph=False)])
    return result


def recorded(
    method: Callable[[Batch], Mapping[str, Tensor]],
    model: nn.Module,
    optimizer: FusedOptimizer | None = None,
    *,
    compiled: bool = False,
) -> GraphedStep:
    """Turn a learner's `method`, a training step, into one that is recorded, or compiled if `compiled` is true.

    `GraphedStep` explains both. The step holds the learner by a weak reference only, so that the learner's GPU memory
    is freed after training.
    """
    weak = WeakMethod(method)

    def step(batch: Batch) -> Mapping[str, Tensor]:
        own = weak()
        assert own is not None
        return own(batch)

    return GraphedStep(step, model, optimizer, compiled=compiled)
