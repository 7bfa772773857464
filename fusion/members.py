"""The member axis: indices into it, and vectors along it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def member_indices(indices: Sequence[int], K: int) -> list[int]:
    """Indices of members as non-negative integers, checked.

    >>> member_indices([0, -1], 4)
    [0, 3]
    """
    chosen = [int(k) for k in indices]
    if not chosen:
        raise ValueError("indices is empty, but a fused model has at least one member")
    for k in chosen:
        if not -K <= k < K:
            raise IndexError(f"index {k} is out of range for a fused model of {K} members")
    return [k % K for k in chosen]


def member_vector(name: str, value: Any, K: int) -> Tensor:
    """A number, or one number per member, as a float64 vector [K] on the CPU.

    >>> member_vector("lr", 0.1, 3).tolist()
    [0.1, 0.1, 0.1]
    """
    vector = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    if vector.ndim > 1 or (vector.ndim == 1 and len(vector) != K):
        shape = tuple(vector.shape)
        raise ValueError(f"{name} has shape {shape}, but must be a number or one for each of {K} members")
    return vector.expand(K).clone()
