"""Preparation of kernel inputs for K members: autocast's dtype, and finite values if a GPU kernel mixes members."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HUGE = 1e30
"""Replaces infinity and NaN. The product of two such values is infinite, so the member's loss soon is not finite."""


def cast(x: Tensor) -> Tensor:
    """Convert `x` to autocast's dtype if autocast is on; float64 stays as it is."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


def mixes_groups(x: Tensor) -> bool:
    """Return whether the kernel of a grouped convolution may mix groups, so that a NaN of one reaches another.

    On tensor cores, cuDNN computes several groups at once, and multiplies the channels of other groups by zero. Zero
    times NaN is NaN.
    """
    return x.is_cuda and x.is_floating_point()


def finite(x: Tensor) -> Tensor:
    """Cast `x` to autocast's dtype as `cast` does, and make all values finite. The gradient passes unchanged.

    NaN and infinity become `HUGE`, and minus infinity `-HUGE`. If the dtype's largest number is smaller than `HUGE`, it
    takes the place of `HUGE`.
    """
    result: Tensor = _Finite.apply(cast(x))  # type: ignore[no-untyped-call]
    return result


def of_finite_gradient(x: Tensor) -> Tensor:
    """Return the values of `x`; in the backward pass, make gradients finite as `finite` does with values."""
    result: Tensor = _FiniteGradient.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Finite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _replaced(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _FiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _replaced(gradient)


def _replaced(x: Tensor) -> Tensor:
    huge = min(HUGE, torch.finfo(x.dtype).max)
    return torch.nan_to_num(x, huge, huge, -huge)
