"""Dropout with each member's own mask and probability, and leaky ReLU with each member's own slope."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.evaluate.rules.drawing import strides_alone
from fusion.evaluate.rules.member import Member
from fusion.streams import Streams


def dropout(
    K: int, input: Member, p: float | Member = 0.5, training: bool = True, inplace: bool = False, *, streams: Streams
) -> Any:
    """Compute `F.dropout` for K members; `p` is one probability for all members, or one for each."""
    p_K = probabilities(p, K)
    if not training or not any(p_K):
        return input
    if input.value.device.type != "cpu" or (inplace and input.dim is None):
        return NotImplemented
    x_K = input.lead(K)
    mask_K = masks(x_K, p_K, streams)
    return Member(x_K.mul_(mask_K) if inplace else x_K * mask_K, 0)


def rrelu(input: Tensor, lower: Any = 1 / 8, upper: Any = 1 / 3, training: bool = False, inplace: bool = False) -> Any:
    """Compute `F.rrelu` in evaluation, with the mean of both bounds as slope. `vmap` has no rule for it."""
    return NotImplemented if training else F.leaky_relu(input, (lower + upper) / 2, inplace)


def leaky_relu(input: Tensor, negative_slope: Any = 0.01, inplace: bool = False) -> Any:
    """Compute `F.leaky_relu` with a slope that is a tensor; torch's own function accepts only a number."""
    if not isinstance(negative_slope, Tensor):
        return NotImplemented
    out = torch.where(input > 0, input, input * negative_slope)
    return input.copy_(out) if inplace else out


def probabilities(p: float | Member, K: int) -> list[float]:
    """Return each member's dropout probability; raise torch's `ValueError` if one is not in [0, 1]."""
    p_K = p.numbers() if isinstance(p, Member) else [float(p)] * K
    for value in p_K:
        if not 0 <= value <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {value}")
    return p_K


def masks(x_K: Tensor, p_K: list[float], streams: Streams) -> Tensor:
    """Draw dropout masks [K, ...] on the CPU: an element is 0 with its member's probability p, else 1 / (1 - p).

    Each member draws the same numbers as `F.dropout` does for the member alone; none are drawn if p is 0 or 1.
    """
    kept = torch.empty_strided(x_K.shape, (x_K[0].numel(), *strides_alone(x_K)), dtype=x_K.dtype)
    for k, (row, p) in enumerate(zip(kept, p_K)):
        if 0 < p < 1 and row.numel():
            row.bernoulli_(1 - p, generator=streams[k].generator(row.device))
        else:
            row.fill_(p < 1)
    left_K = [1 - p if p < 1 else 1.0 for p in p_K]
    if len(set(left_K)) == 1:
        return kept.div_(left_K[0])
    # Torch divides by a number. So divide by tensors that are not rounded to half precision, either.
    precise = torch.promote_types(x_K.dtype, torch.float32)
    return kept.div_(torch.tensor(left_K, dtype=precise).reshape(-1, *[1] * (x_K.dim() - 1)))
