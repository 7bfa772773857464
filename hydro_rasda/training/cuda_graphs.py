"""Learners' steps as CUDA graphs, or compiled."""

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
    """Tell whether training steps are recorded, unless an obstacle is found later."""
    return problem.settings.graph is not False and can_record(problem.device)


def with_graphs(train: Callable[[Problem], Result], problem: Problem) -> Result:
    """Train with recorded steps where they fit: a recording holds memory beside the steps that run as written."""
    (result,) = back_off(train, problem, records, lambda asked: [asked.with_settings(graph=False)])
    return result


def recorded(
    method: Callable[[Batch], Mapping[str, Tensor]],
    model: nn.Module,
    optimizer: FusedOptimizer | None = None,
    *,
    compiled: bool = False,
) -> GraphedStep:
    """A learner's method as a step that is recorded, see `GraphedStep`.

    The learner is not kept by it: what it has of a GPU's memory is free as soon as nobody trains it any more.
    """
    weak = WeakMethod(method)

    def step(batch: Batch) -> Mapping[str, Tensor]:
        own = weak()
        assert own is not None
        return own(batch)

    return GraphedStep(step, model, optimizer, compiled=compiled)
