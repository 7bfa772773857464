"""The member axis: indices into it, and vectors along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def member_indices(indices: Sequence[int], K: int, name: str = "indices") -> list[int]:
    """Indices of members as non-negative integers, checked.

    >>> member_indices([0, -1], 4)
    [0, 3]
    """
    chosen = [int(k) for k in indices]
    if not chosen:
        raise ValueError(f"`{name}` is empty, but must name at least one member")
    for k in chosen:
        if not -K <= k < K:
            raise IndexError(f"`{name}` has {k}, but must be in [-{K}, {K}): there are {K} members")
    return [k % K for k in chosen]


def member_rows(tensor_K: Tensor, chosen: Sequence[int]) -> Tensor:
    """A copy of [K, ...] with these members alone, in this order: [len(chosen), ...]."""
    return tensor_K.detach().index_select(0, torch.tensor(chosen, device=tensor_K.device))


def member_vector(name: str, value: Any, K: int) -> Tensor:
    """A number, or one number per member, as a float64 vector [K] on the CPU.

    >>> member_vector("lr", 0.1, 3).tolist()
    [0.1, 0.1, 0.1]
    """
    rule = f"a number or one for each of {K} members"
    try:
        vector = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"`{name}` is {value!r}, but must be {rule}") from None
    if vector.ndim > 1 or (vector.ndim == 1 and len(vector) != K):
        raise ValueError(f"`{name}` has shape {tuple(vector.shape)}, but must be {rule}")
    return vector.expand(K).clone()
