"""In which floating-point format models compute; weights, gradients, optimizer state and statistics stay in theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from fusion import LossScale
from hydro_rasda.data import Batch
from hydro_rasda.problem.objective import Objective
from hydro_rasda.problem.objective_parts import ByPart
from hydro_rasda.settings.config import Precision

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Autocast:
    """An objective whose matrix products and convolutions compute in bfloat16 or float16 (`torch.autocast`).

    Its results are in float32, so that means and losses are summed there. bfloat16 has float32's range. In float16, the
    training has to scale the losses (`fusion.LossScale`).
    """

    objective: Objective
    dtype: torch.dtype = torch.bfloat16

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        tensor = next(chain(model.parameters(), model.buffers()), None)
        with torch.autocast("cpu" if tensor is None else tensor.device.type, self.dtype):
            metrics = self.objective(model, batch)
        if not isinstance(metrics, Mapping):
            return metrics  # refused by whoever checks what the user's objective returns
        return {
            name: value.float() if isinstance(value, Tensor) and value.dtype in _HALF.values() else value
            for name, value in metrics.items()
        }


def in_precision(objective: Objective, precision: Precision) -> Objective:
    """The objective as it is to be computed."""
    return Autocast(objective, _HALF[precision]) if precision in _HALF else objective


def loss_scale(precision: Precision, K: int, device: torch.device) -> LossScale | None:
    """A scale for the losses of each of K models, where gradients would else vanish."""
    return LossScale(K, device) if precision == "fp16" else None


def as_given(objective: Objective) -> Objective:
    """The user's own objective, whatever it is computed in."""
    return objective.objective if isinstance(objective, Autocast) else objective


def turns(objective: Objective) -> dict[str, Objective]:
    """Return the objectives that take turns in a step, as they are computed, by the part of the model that each moves.

    The part of an objective that moves the whole model is "".
    """
    given = as_given(objective)
    if not isinstance(given, ByPart):
        return {"": objective}
    if isinstance(objective, Autocast):
        return {part: replace(objective, objective=own) for part, own in given.parts.items()}
    return dict(given.parts)


@contextmanager
def matrix_products(precision: Precision) -> Iterator[None]:
    """Have CUDA's matrix products and convolutions use TF32 where that is asked for; elsewhere leave torch as it is."""
    if precision != "tf32":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
