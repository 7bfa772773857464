"""What one model does with one batch: a loss and metrics, written for ONE model, run for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import Batch

Objective = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""`objective(model, batch) -> {"loss": scalar, ...}`. `model` is a real module, `batch` whatever the data yields.

`loss` is the mean over the batch; it is differentiated. Any further scalars are metrics, averaged over the examples.
Under fusion it runs once for K models (`torch.func.vmap`): no `.item()`, no branch on a tensor's values.
"""

LossFn = Callable[[Tensor, Tensor], Tensor]
"""`loss_fn(output [N, ...], target [N, ...]) -> scalar`, such as those of `torch.nn.functional`."""


def supervised(loss_fn: LossFn = F.cross_entropy) -> Objective:
    """The objective for batches `(inputs, target)`.

    Classification (an integer target [N, ...] and an output with one more dimension, the classes [N, C, ...]) also
    reports `accuracy`; regression (a floating-point target) `mae`, the mean absolute error.

    Args:
        loss_fn: Mean loss of a batch.

    Returns:
        The objective. It raises ValueError where a floating-point target [N, ...] has another shape than the output:
        broadcasting one against the other would train on nonsense.
    """

    def objective(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        inputs, target = _pair(batch)
        output = model(inputs)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"the model returns a {type(output).__name__}, but `loss_fn` needs a tensor; give "
                "`objective=`, a function of (model, batch) that returns a dict with the loss"
            )
        if target.is_floating_point():
            if output.shape != target.shape:
                raise ValueError(
                    f"target of shape {tuple(target.shape)} for a model output of shape {tuple(output.shape)}: a "
                    "floating-point target must have the output's shape"
                )
            return {"loss": loss_fn(output, target), "mae": (output - target).abs().mean()}
        metrics = {"loss": loss_fn(output, target)}
        if output.ndim == target.ndim + 1:
            metrics["accuracy"] = (output.argmax(1) == target).float().mean()
        return metrics

    return objective


def _pair(batch: Batch) -> tuple[object, Tensor]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise TypeError(
        f"a batch is a {type(batch).__name__}, but `loss_fn` needs (inputs, target); for other batches give "
        "`objective=`, a function of (model, batch) that returns a dict with the loss"
    )


def check_metrics(metrics: object) -> None:
    """Check what an objective returned for one model and one batch.

    Raises:
        TypeError: where it is no mapping of names to scalar tensors.
        ValueError: where `loss` is missing or is no scalar.
    """
    if not isinstance(metrics, Mapping) or not all(isinstance(v, Tensor) for v in metrics.values()):
        raise TypeError('`objective` must return a dict of tensors, such as {"loss": loss}')
    if "loss" not in metrics:
        raise ValueError(f'`objective` returned {sorted(metrics)}, but must return a "loss"')
    for name, value in metrics.items():
        if value.ndim:
            raise ValueError(f"`objective` returned {name!r} of shape {tuple(value.shape)}, but must return scalars")
    if not torch.is_floating_point(metrics["loss"]):
        raise ValueError(f'`objective` returned a "loss" of {metrics["loss"].dtype}, but must return a float')
