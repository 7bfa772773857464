"""Pooling: K folds into the channels if they lie side by side (torch folds it into the batch, which needs a copy)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fusion.rules.conv import fold_channels, unfold_channels
from fusion.rules.member import Member, Rule


def pooling(function: Callable[..., Any]) -> Rule:
    """Make the rule of a pooling over height and width: input [N, C, H, W]."""

    def fold(K: int, input: Member, *args: Any, **kwargs: Any) -> Any:
        if input.value.dim() != 5 or input.dim is None or not _side_by_side(input.at(K, 1)):
            return NotImplemented
        out = function(fold_channels(input, K), *args, **kwargs)
        return unfold_channels(out, K) if isinstance(out, Tensor) else NotImplemented

    return fold


def _side_by_side(x_NKCHW: Tensor) -> bool:
    return x_NKCHW.stride(1) == x_NKCHW.shape[2] * x_NKCHW.stride(2)
