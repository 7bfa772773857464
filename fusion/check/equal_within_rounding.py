"""The results of one member's step, fused or alone, and a comparison of two such results within rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# A fused member may differ from the member alone by up to `_SLACK` times the change that slightly changed weights cause
# in the member alone.
_SLACK = 4.0
# Number of examples that a metric such as accuracy may count differently. If a model gives two classes nearly equal
# scores, rounding decides which class it predicts.
JUMPS = 2
# Differences are relative to the size of a result. A gradient that should be zero consists of rounding errors alone.
# The size of a gradient therefore counts as at least 1 % of the largest gradient's size.
_LEAST_SHARE = 0.01


@dataclass
class MemberResults:
    """Results of one member's step.

    Attributes:
        buffers: All buffers, and the parameters that forward writes to.
        attributes: Plain attributes of the modules.
        counted: The names of those `values` that have no gradient, such as an accuracy.
    """

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    attributes: dict[str, Any]
    counted: frozenset[str] = frozenset()

    def tensors(self) -> dict[str, Tensor]:
        return {**self.values, **self.gradients, **self.buffers}


def differences(together: MemberResults, alone: MemberResults, eps: float, jump: float) -> list[str]:
    """Return the names of the results that differ between `together` and `alone` by more than rounding explains.

    Args:
        eps: Relative rounding error.
        jump: Allowed relative difference of the results in `counted` that are means, such as an accuracy.
    """
    found = [name for name, value in alone.attributes.items() if not _same(value, together.attributes.get(name))]
    largest = max((_size(gradient) for gradient in alone.gradients.values()), default=0.0)
    ours = together.tensors()
    for name, value in alone.tensors().items():
        scale = max(_size(value), _LEAST_SHARE * largest if name in alone.gradients else 0.0)
        allowed = _tolerance(value, eps) * scale
        if name in alone.counted:
            allowed = max(allowed, jump * scale if value.is_floating_point() else JUMPS)
        if not _distance(ours[name], value) <= allowed:
            found.append(name)
    return found


def explained(name: str, together: MemberResults, alone: MemberResults, tries: Sequence[MemberResults]) -> bool:
    """Return whether rounding explains that the result `name` differs between `together` and `alone`.

    Rounding explains it if the result changes about as much in one of `tries`. These are runs of the member alone with
    slightly changed weights, or in another memory layout.
    """
    if name in alone.attributes:
        return False
    ours, value = together.tensors()[name], alone.tensors()[name]
    moved = max(_distance(one.tensors()[name], value) for one in tries)
    return _distance(ours, value) <= _SLACK * moved


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of two tensors.

    If both tensors have values that are not finite, return 0. If only one has, or the shapes differ, return infinity.
    """
    if a.shape != b.shape:
        return float("inf")
    a, b = _dense(a), _dense(b)
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(b.device, wide), b.to(wide)
    if not b.isfinite().all():
        return 0.0 if not a.isfinite().all() else float("inf")
    return float((a - b).abs().nan_to_num(float("inf")).max()) if a.numel() else 0.0


def _size(value: Tensor) -> float:
    """Return the largest finite absolute value of a tensor's elements."""
    value = _dense(value)
    finite = value[value.isfinite()]
    # Use booleans as they are, because torch has no `abs` for them.
    return float((finite if finite.dtype == torch.bool else finite.abs()).max()) if finite.numel() else 0.0


def _dense(value: Tensor) -> Tensor:
    return value if value.layout == torch.strided else value.to_dense()


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return value == other or abs(value - other) <= 1e-3 * abs(value) or (value != value and other != other)
    return type(value) is type(other) and bool(value == other)


def _tolerance(value: Tensor, eps: float) -> float:
    """Return the allowed relative difference: the square root of the rounding error, so that half of the digits agree.

    The tolerance is large, because rounding errors add up over layers. Real faults are seldom this small. Integers must
    be equal.
    """
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(max(torch.finfo(value.dtype).eps, eps) ** 0.5)
