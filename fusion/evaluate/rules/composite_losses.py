"""Losses that this package implements itself. Under `vmap`, torch's own ones loop over members or branch on values."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.evaluate.rules.member import Member, fold


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """Compute `F.kl_div` under `vmap`, without torch's warning about "mean" and "batchmean"."""
    if size_average is not None or reduce is not None:
        return NotImplemented
    losses = target.exp() * (target - input) if log_target else torch.xlogy(target, target) - target * input
    if reduction == "batchmean":
        return losses.sum() / (input.shape[0] if input.dim() else 1)
    return _reduced(losses, reduction)


def margin_ranking(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Compute `F.margin_ranking_loss` under `vmap`, of three tensors with the same number of dimensions."""
    if size_average is not None or reduce is not None or not input1.dim() == input2.dim() == target.dim():
        return NotImplemented
    return _reduced((-target * (input1 - input2) + margin).clamp_min(0), reduction)


def triplet_margin(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Compute `F.triplet_margin_loss` under `vmap`, of three tensors with the same number of dimensions."""
    if size_average is not None or reduce is not None or not anchor.dim() == positive.dim() == negative.dim():
        return NotImplemented
    if margin <= 0:
        return NotImplemented  # torch's own function raises an error about the margin
    near, far = (F.pairwise_distance(anchor, other, p, eps) for other in (positive, negative))
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp_min(0), reduction)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Any:
    """Compute `F.linear_cross_entropy` with a 2-D weight, without chunks, which have no gradient under `vmap`."""
    if linear_weight.dim() != 2 or (ignore_index is not None and target.is_floating_point()):
        return NotImplemented
    return F.cross_entropy(
        F.linear(input, linear_weight, linear_bias),
        target,
        weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
    )


def gaussian_nll(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """Compute `F.gaussian_nll_loss` without torch's branch on negative variances, which `vmap` cannot follow."""
    if not isinstance(var, Tensor):
        return NotImplemented
    fold(_refuse_below_0, (var,), {})
    if var.shape == input.shape[:-1] and var.shape != input.shape:
        var = var.unsqueeze(-1)
    differing = [of_var for of_input, of_var in zip(input.shape, var.shape) if of_input != of_var]
    if var.dim() != input.dim() or differing not in ([], [1]):
        raise ValueError("var is of incorrect size")
    raised = var + (eps - var).clamp(min=0).detach()  # at least eps, with the gradient of `var`
    losses = 0.5 * (raised.log() + (input - target) ** 2 / raised)
    return _reduced(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


def _refuse_below_0(K: int, var: Member) -> Any:
    if bool((var.value < 0).any()):
        raise ValueError("var has negative entry/entries")
    return var


def _reduced(losses: Tensor, reduction: str) -> Any:
    if reduction not in ("none", "mean", "sum"):
        return NotImplemented  # torch's own function raises the error
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
