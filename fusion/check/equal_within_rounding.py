"""Results of a member's step, fused or alone, and a comparison of two of them within rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# A member fused may differ this many times as much as it does alone when its weights move by some roundings.
_SLACK = 4.0
# Metrics that count, such as accuracy, jump if an example's two best classes are a rounding apart.
JUMPS = 2
# A gradient that is zero but for rounding has no scale of its own: it is measured by 1 % of the largest gradient.
_LEAST_SHARE = 0.01


@dataclass
class MemberResults:
    """Results of one member's step: tensors by kind (of parameters, only those written to), and plain attributes."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    attributes: dict[str, Any]
    counted: frozenset[str] = frozenset()

    def tensors(self) -> dict[str, Tensor]:
        return {**self.values, **self.gradients, **self.buffers}


def differences(together: MemberResults, alone: MemberResults, eps: float, jump: float) -> list[str]:
    """Return the names of results that differ by more than roundings of relative size `eps` are likely to cause."""
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
    """Return whether the member alone changes about as much when its weights change in their last digits."""
    if name in alone.attributes:
        return False
    ours, value = together.tensors()[name], alone.tensors()[name]
    moved = max(_distance(one.tensors()[name], value) for one in tries)
    return _distance(ours, value) <= _SLACK * moved


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; 0 if neither is finite, infinite if only one is."""
    if a.shape != b.shape:
        return float("inf")
    a, b = _dense(a), _dense(b)
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(b.device, wide), b.to(wide)
    if not b.isfinite().all():
        return 0.0 if not a.isfinite().all() else float("inf")
    return float((a - b).abs().nan_to_num(float("inf")).max()) if a.numel() else 0.0


def _size(value: Tensor) -> float:
    """Return the largest finite absolute value."""
    value = _dense(value)
    finite = value[value.isfinite()]
    # Booleans have no absolute value.
    return float((finite if finite.dtype == torch.bool else finite.abs()).max()) if finite.numel() else 0.0


def _dense(value: Tensor) -> Tensor:
    return value if value.layout == torch.strided else value.to_dense()


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return value == other or abs(value - other) <= 1e-3 * abs(value) or (value != value and other != other)
    return type(value) is type(other) and bool(value == other)


def _tolerance(value: Tensor, eps: float) -> float:
    """Return the tolerance, half the digits: rounding errors add up over layers, but faults are seldom small."""
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(max(torch.finfo(value.dtype).eps, eps) ** 0.5)
