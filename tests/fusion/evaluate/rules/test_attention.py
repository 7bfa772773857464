"""Attention, folded into the batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.evaluate.rules.drawing import DRAWING
from tests.fusion.evaluate.rules.folding import SHARED, assert_folds, assert_modules_fold, member, tensor


@pytest.mark.parametrize("mask_shape", [None, (5, 7), (2, 1, 5, 7), (2, 4, 5, 7)])
@pytest.mark.parametrize("mask", SHARED)
def test_attention(mask: int | None, mask_shape: tuple[int, ...] | None) -> None:
    q, k, v = member(2, 4, 5, 8), member(2, 4, 7, 8), member(2, 4, 7, 8)
    if mask_shape is None:
        assert_folds(F.scaled_dot_product_attention, q, k, v, dims=(0, 0, 0))
    else:
        inputs = q, k, v, tensor(mask, *mask_shape)
        assert_folds(F.scaled_dot_product_attention, *inputs, dims=(0, 0, 0, mask))


@pytest.mark.parametrize("mask", [None, 0])
def test_attention_to_keys_that_all_samples_share(mask: int | None) -> None:
    q, k, v, own = member(2, 4, 5, 8), member(1, 4, 7, 8), member(1, 4, 7, 8), tensor(mask, 2, 1, 5, 7)
    assert_folds(F.scaled_dot_product_attention, q, k, v, own, dims=(0, 0, 0, mask))


def test_attention_causal_scaled_and_grouped_query() -> None:
    q, k, v = member(2, 4, 5, 8), torch.randn(2, 2, 5, 8), member(2, 2, 5, 8)

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)

    assert_folds(op, q, k, v, dims=(0, None, 0))


MASKS = torch.randn(2 * 4, 5, 5, generator=torch.Generator().manual_seed(0))
ATTENTION_CALLS: list[dict[str, Any]] = [
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": True, "average_attn_weights": False},
    {"need_weights": False, "attn_mask": MASKS[0]},
    {"need_weights": False, "attn_mask": MASKS},
    {"need_weights": False, "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True},
    {"need_weights": True, "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True},
    {"need_weights": False, "key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    {
        "need_weights": True,
        "key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
        "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
    },
]


@pytest.mark.parametrize("call", ATTENTION_CALLS, ids=lambda call: "+".join(call))
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(batch_first: bool, call: dict[str, Any]) -> None:
    shape = (2, 5, 16) if batch_first else (5, 2, 16)
    assert_modules_fold(lambda: nn.MultiheadAttention(16, 4, batch_first=batch_first), [torch.randn(shape)] * 3, call)


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 7}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_multihead_attention_across_sources(options: dict[str, Any]) -> None:
    key, value = options.get("kdim", 16), options.get("vdim", 16)
    inputs = [torch.randn(5, 2, 16), torch.randn(7, 2, key), torch.randn(7, 2, value)]
    assert_modules_fold(lambda: nn.MultiheadAttention(16, 4, **options), inputs, {})


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.1, True), (torch.tensor(0.0), True)])
def test_attention_draws_where_it_may_drop(dropout: Any, draws: bool, training: bool) -> None:
    """What draws has a stream for each member; a probability in a tensor is not looked at."""
    assert DRAWING[F.scaled_dot_product_attention](*[None] * 4, dropout) == draws
    arguments = [*[None] * 10, dropout]
    assert DRAWING[F.multi_head_attention_forward](*arguments, training=training) == (draws and training)
