"""Set the floating-point format in which models compute.

Weights, gradients, optimizer state and statistics keep their own formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from fusion import LossScale
from hydro_rasda.data import Batch
from hydro_rasda.problem.objective import ByPart, Objective
from hydro_rasda.settings.config import Precision

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Autocast:
    """An objective whose matrix products and convolutions compute in bfloat16 or float16 (`torch.autocast`).

    Results are converted to float32, in which means and losses are summed. bfloat16 has the range of float32. In
    float16, training must scale the losses (`fusion.LossScale`).
    """

    objective: Objective
    dtype: torch.dtype = torch.bfloat16

    def __call__(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        tensor = next(chain(model.parameters(), model.buffers()), None)
        with torch.autocast("cpu" if tensor is None else tensor.device.type, self.dtype):
            metrics = self.objective(model, batch)
        if not isinstance(metrics, Mapping):
            return metrics  # `check_metrics` raises an error for this result
        return {
            name: value.float() if isinstance(value, Tensor) and value.dtype in _HALF.values() else value
            for name, value in metrics.items()
        }


def in_precision(objective: Objective, precision: Precision) -> Objective:
    """Return an objective that does the same as `objective`, but computes in `precision`."""
    return Autocast(objective, _HALF[precision]) if precision in _HALF else objective


def loss_scale(precision: Precision, K: int, device: torch.device) -> LossScale | None:
    """Return scales for the losses of K models in float16, where gradients could vanish; None in other precisions."""
    return LossScale(K, device) if precision == "fp16" else None


def as_given(objective: Objective) -> Objective:
    """Return the user's objective without the wrapper that sets its precision."""
    return objective.objective if isinstance(objective, Autocast) else objective


def turns(objective: Objective) -> dict[str, Objective]:
    """Map each part of the model to the objective that trains it, in the precision of `objective`.

    The objectives take turns in a step. If a single objective trains the whole model, its part is "".
    """
    given = as_given(objective)
    if not isinstance(given, ByPart):
        return {"": objective}
    if isinstance(objective, Autocast):
        return {part: replace(objective, objective=own) for part, own in given.parts.items()}
    return dict(given.parts)


@contextmanager
def matrix_products(precision: Precision) -> Iterator[None]:
    """If the precision is "tf32", let CUDA's matrix products and convolutions use TF32 within the context."""
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
