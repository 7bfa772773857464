"""Attention for K members: K is folded into the batch. On a CPU, torch's own batching rule loops over the members."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.evaluate.rules.dropout import masks, probabilities
from fusion.evaluate.rules.member import Member
from fusion.streams import Streams


def attention(
    K: int,
    query: Member,
    key: Member,
    value: Member,
    attn_mask: Member | None = None,
    dropout_p: float | Member = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    streams: Streams,
) -> Any:
    """Compute `F.scaled_dot_product_attention` for K members, each with query [N, H, T, E], key and value [N, H, S, E].

    The mask can be broadcast to [N, H, T, S].
    """
    p_K = probabilities(dropout_p, K)
    if query.value.dim() - (query.dim is not None) != 4 or (any(p_K) and (enable_gqa or query.value.is_cuda)):
        return NotImplemented
    batch = query.lead(K).shape[:2]
    if any(x.lead(K).shape[:2] != batch for x in (key, value)):
        return NotImplemented  # keys that all samples share, with a batch of 1, would be broadcast over members
    q, k, v = (x.lead(K).flatten(0, 1) for x in (query, key, value))
    mask = None if attn_mask is None else _fold_mask(attn_mask, K, batch[1])
    if any(p_K):
        weights = _weights(q, k, mask, is_causal, scale)
        mask_K = masks(weights.unflatten(0, batch), p_K, streams)
        return Member(((weights * mask_K.flatten(0, 1)) @ v).unflatten(0, batch), 0)
    options: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
    out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, **options)
    return Member(out.unflatten(0, batch), 0)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """Return the attention weights [N, H, T, S], which dropout needs. Torch's CPU kernel does the same for dropout."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    if mask is not None:
        kept = mask if mask.dtype != torch.bool else _additive(~mask, q.dtype)
        return torch._safe_softmax(scores + kept, -1)
    return torch.softmax(_causal(scores) if is_causal else scores, -1)


def _fold_mask(mask: Member, K: int, N: int) -> Tensor:
    """Fold K into the batch axis of a mask. A mask that all members and samples share is returned as it is."""
    own_dims = mask.value.dim() - (mask.dim is not None)
    if mask.dim is None and (own_dims < 4 or mask.value.shape[0] == 1):
        return mask.value
    mask_K = mask.lead(K)
    mask_K = mask_K.reshape(K, *[1] * (4 - own_dims), *mask_K.shape[1:])
    return mask_K.expand(K, N, *mask_K.shape[2:]).flatten(0, 1)


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Compute `F.multi_head_attention_forward` under `vmap`, with query [T, N, E], key and value [S, N, E].

    N is the first axis in every product, so that K and N are adjacent. Attention can then fold K into N without copies.
    """
    extras = (bias_k, bias_v, static_k, static_v)
    if query.dim() != 3 or add_zero_attn or any(extra is not None for extra in extras):
        return NotImplemented
    x = (query, key, value)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    q, k, v = (_heads(p, num_heads) for p in _projections(x, weights, in_proj_bias))
    if is_causal and attn_mask is None:
        raise ValueError("is_causal=True needs attn_mask")
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _merged_mask(attn_mask, key_padding_mask, q)
    p = dropout_p if training else 0.0
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        scores = _causal(scores) if causal else scores if mask is None else scores + mask
        attention_NHTS = F.dropout(torch.softmax(scores, -1), p, training)
        out = attention_NHTS @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
    # Keep torch's memory layout, because a later dropout draws its random numbers in the order of memory.
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if not need_weights:
        return out, None
    return out, attention_NHTS.mean(1) if average_attn_weights else attention_NHTS


def _projections(x: tuple[Tensor, ...], weights: Any, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Project `x` to query, key and value, [N, T, E] each. If all three come from one tensor, one product is enough."""
    first = tuple(part.transpose(0, 1) for part in x)
    if isinstance(weights, Tensor):
        if x[0] is x[1] and x[1] is x[2]:
            return F.linear(first[0], weights, bias).chunk(3, -1)
        weights = weights.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(F.linear(*part) for part in zip(first, weights, biases))


def _heads(x_NTE: Tensor, num_heads: int) -> Tensor:
    """Split [N, T, E] into heads, [N, H, T, E/H]."""
    heads: Tensor = x_NTE.unflatten(-1, (num_heads, -1))
    return heads.transpose(1, 2)


def _merged_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q_NHTE: Tensor) -> Tensor | None:
    """Return the sum of both masks, to be added to the scores [N, H, T, S]; None if there is no mask.

    Args:
        attn_mask: [T, S] or [N*H, T, S].
        key_padding_mask: [N, S].
    """
    mask = None if attn_mask is None else _additive(attn_mask, q_NHTE.dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, q_NHTE.shape[:2])
    if key_padding_mask is None:
        return mask
    padding = _additive(key_padding_mask, q_NHTE.dtype)[:, None, None, :]
    return padding if mask is None else mask + padding


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _causal(scores_NHTS: Tensor) -> Tensor:
    upper: Tensor = torch.ones(scores_NHTS.shape[-2:], dtype=torch.bool, device=scores_NHTS.device).triu(1)
    return scores_NHTS.masked_fill(upper, float("-inf"))
