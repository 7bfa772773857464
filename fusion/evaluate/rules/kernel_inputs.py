"""Tensors as kernels of K members need them: in autocast's type, and finite where a GPU would mix the members."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HUGE = 1e30
"""Stands for what is infinite or not a number: the product of two is infinite again, and so is the member's loss."""


def cast(x: Tensor) -> Tensor:
    """Return `x` in the type that autocast would compute in."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


def mixes_groups(x: Tensor) -> bool:
    """Return whether kernels of a grouped convolution compute several groups at once.

    cuDNN's do, on tensor cores: they multiply the channels of one group by zeros for another one. Zero times NaN is NaN
    in all of them.
    """
    return x.is_cuda and x.is_floating_point()


def finite(x: Tensor) -> Tensor:
    """Replace values that are not finite, such as those of a member that diverges; the gradient passes."""
    result: Tensor = _Finite.apply(cast(x))  # type: ignore[no-untyped-call]
    return result


def of_finite_gradient(x: Tensor) -> Tensor:
    """Return the same values; what is not finite in their gradient is replaced."""
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
