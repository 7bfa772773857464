"""Checks and operations along the member axis: indices of members, rows of tensors, and vectors [K]."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.argument_checks import plain, refusal, require


def member_indices(indices: Sequence[int], K: int, name: str = "indices") -> list[int]:
    """Check the indices of members, and return them as non-negative integers.

    Raises:
        ValueError: if there are none, or one is no integer.
        IndexError: if one is not in [-K, K).

    >>> member_indices([0, -1], 4)
    [0, 3]
    """
    rule = "a list of indices of members, at least one"
    vector = isinstance(indices, Tensor) and indices.ndim == 1
    listed = isinstance(indices, Sequence) and not isinstance(indices, str | bytes)
    require(vector or listed, name, indices, rule)
    if len(indices) == 0:
        raise ValueError(f"`{name}` is empty, but must name at least one member")
    chosen = [_index(name, k) for k in indices]
    for k in chosen:
        if not -K <= k < K:
            there = "is 1 member" if K == 1 else f"are {K} members"
            raise IndexError(f"`{name}` has {k}, but must be in [-{K}, {K}): there {there}")
    return [k % K for k in chosen]


def member_pairs(sources: Mapping[int, int], K: int) -> tuple[list[int], list[int]]:
    """Check `sources`, which maps each member that becomes a copy to its source; return the targets and the sources.

    They are returned as non-negative integers, without members that would become copies of themselves.

    >>> member_pairs({2: 0, -1: 1, 1: 1}, 4)
    ([2, 3], [0, 1])
    """
    require(isinstance(sources, Mapping), "sources", sources, "a dict: for each member that is a copy, its source")
    if not sources:
        return [], []
    targets, copied = (member_indices(list(indices), K, "sources") for indices in (sources.keys(), sources.values()))
    require(len({*targets}) == len(targets), "sources", dict(sources), "one source for each member")
    pairs = [(target, source) for target, source in zip(targets, copied) if target != source]
    return [target for target, _ in pairs], [source for _, source in pairs]


@torch.no_grad()
def copy_rows(tensor_K: Tensor, targets: Sequence[int], sources: Sequence[int]) -> None:
    """Copy the rows `sources` of [K, ...] to the rows `targets`, in place. All rows are read before any is written."""
    tensor_K.index_copy_(0, torch.tensor(targets, device=tensor_K.device), member_rows(tensor_K, sources))


def _index(name: str, value: object) -> int:
    value = plain(value)
    try:
        # Refuse a bool, because a mask such as [False, True] would otherwise mean the members 0 and 1.
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ValueError(refusal(name, value, "an integer, or a list of them"))


def member_rows(tensor_K: Tensor, chosen: Sequence[int]) -> Tensor:
    """Copy the rows of the chosen members, in this order: [len(chosen), ...]."""
    return tensor_K.detach().index_select(0, torch.tensor(chosen, device=tensor_K.device))


def member_vector(name: str, value: Any, K: int, *, flags: bool = False) -> Tensor:
    """Make a float64 vector [K] on the CPU from one number, or from one number per member.

    If `flags` is True, `value` has booleans, which become 0 and 1.

    >>> member_vector("lr", 0.1, 3).tolist()
    [0.1, 0.1, 0.1]
    """
    rule = f"{'True, False' if flags else 'a number'} or one for each of {K} members"
    each = value if isinstance(value, list | tuple) else (value,)
    require(all(isinstance(v, bool | Tensor) if flags else not isinstance(v, bool) for v in each), name, value, rule)
    try:
        vector = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(refusal(name, value, rule)) from None
    if vector.ndim > 1 or (vector.ndim == 1 and len(vector) != K):
        raise ValueError(f"`{name}` has shape {tuple(vector.shape)}, but must be {rule}")
    return vector.expand(K).clone()
