"""Embeddings and indexing for K members: each member's indices select rows of its own table only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.evaluate.rules.drawing import member_by_member
from fusion.evaluate.rules.member import Member, Rule
from fusion.streams import Streams


def embedding(
    K: int,
    input: Member,
    weight: Member,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Compute `F.embedding` for K members, each with indices [...] and weight [V, E].

    The K tables are stacked into one of K*V rows.

    The gradient is dense even if `sparse` is True, because autograd cannot split a sparse gradient by member.
    """
    if weight.dim is None:
        return NotImplemented
    weight_KVE, index_K = weight.lead(K), input.lead(K)
    rows = weight_KVE.shape[1]
    if max_norm is not None:
        for table, index in zip(weight_KVE.detach(), index_K):
            torch.embedding_renorm_(table, index.contiguous(), max_norm, norm_type)
    flat = weight_KVE.flatten(0, 1)
    out = F.embedding(_places(K, input, rows), flat, scale_grad_by_freq=scale_grad_by_freq)
    if padding_idx is not None:
        padding = index_K == padding_idx % rows
        out = torch.where(padding.unsqueeze(-1), out.detach(), out)
    return Member(out, 0)


def torch_embedding(
    K: int,
    weight: Member,
    indices: Member,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Compute `torch.embedding` for K members, where a negative `padding_idx` means that no index is padding."""
    padding = padding_idx if padding_idx >= 0 else None
    return embedding(K, indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq)


def embedding_bag(
    K: int,
    input: Member,
    weight: Member,
    offsets: Member | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Member | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Compute `F.embedding_bag` for K members: their tables are stacked into one, and their bags are concatenated.

    With `scale_grad_by_freq`, members run one by one, because torch's gradient of a row depends on earlier rows (torch
    2.13, CPU).
    """
    if scale_grad_by_freq:
        given = (input, weight, offsets, max_norm, norm_type, True, mode, sparse, per_sample_weights)
        return _each_alone(F.embedding_bag, K, *given, include_last_offset, padding_idx)
    if weight.dim is None or max_norm is not None or include_last_offset or padding_idx is not None:
        return NotImplemented
    weight_KVE = weight.lead(K)
    place_K = _places(K, input, weight_KVE.shape[1])
    begin_K = None if offsets is None else offsets.lead(K) + place_K.shape[1] * _numbers(K, offsets.lead(K))
    shares_K = None if per_sample_weights is None else per_sample_weights.lead(K)
    out = F.embedding_bag(
        place_K.flatten(0, 1),
        weight_KVE.flatten(0, 1),
        None if begin_K is None else begin_K.flatten(0, 1),
        mode=mode,
        per_sample_weights=None if shares_K is None else shares_K.flatten(0, 1),
    )
    return Member(out.unflatten(0, (K, -1)), 0)


def _places(K: int, input: Member, rows: int) -> Tensor:
    """Return indices [K, ...] into the K stacked tables, for members' indices into their own tables of `rows` rows."""
    index_K = input.lead(K)
    place_K = index_K + rows * _numbers(K, index_K)
    if input.dim is None:
        return place_K
    # Replace an index out of range, which would select another member's row, by K * rows. Torch then raises an error.
    return torch.where((index_K >= 0) & (index_K < rows), place_K, K * rows)


def _numbers(K: int, like: Tensor) -> Tensor:
    """Return 0, 1, ..., K - 1 as [K, 1, ...], to broadcast with `like` [K, ...], in its dtype and on its device."""
    return torch.arange(K, device=like.device, dtype=like.dtype).view(K, *[1] * (like.dim() - 1))


def one_hot(K: int, input: Member, num_classes: int = -1) -> Any:
    """Compute `F.one_hot` for K members. Torch's own batching rule returns zeros for a class out of range, no error."""
    return NotImplemented if num_classes < 0 else Member(F.one_hot(input.value, num_classes), input.dim)


def index_fill(function: Callable[..., Any]) -> Rule:
    """Make the rule of `index_fill`, which runs members one by one.

    Torch's own batching rule has two errors (torch 2.13). A negative index selects elements of another member. If
    members write different values into a shared tensor, the result is wrong.
    """

    def rule(K: int, input: Member, dim: Any, index: Member, value: Any) -> Any:
        if index.dim is None and not (isinstance(value, Member) and value.dim is not None):
            return NotImplemented
        return _each_alone(function, K, input, dim, index, value)

    return rule


def _each_alone(function: Callable[..., Any], K: int, *args: Any) -> Any:
    """Call `function` once for each member; it must not draw random numbers."""
    return member_by_member(function, Streams(K, range(K)))(K, *args)
