from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from surrogate import make_surrogate
from surrogate.attention import find_logit_scales, head_sizes, scale_logits
from surrogate.multipliers import width_plan
from tests.surrogate.models import narrow_heads, transformer


def test_head_size_kept_means_no_logit_scale() -> None:
    assert width_plan(make_surrogate(transformer, {}, 1 / 4)).attention == {}


def test_head_size_shrunk_scales_logits_by_root_of_the_ratio() -> None:
    plan = width_plan(make_surrogate(narrow_heads, {}, 1 / 4))
    assert plan.attention == {"block.self_attn": math.sqrt(32 / 8)}


@pytest.mark.parametrize("by_name", [False, True])
def test_multihead_attention_with_target_head_16_and_own_head_4(by_name: bool) -> None:
    """Logits are q.k sqrt(D) / d with D = 16, d = 4 (Tensor Programs V, definition 4.1 relative to D)."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)  # heads of 4
    x = torch.randn(3, 5, 8)
    scale_logits(layer, find_logit_scales(layer, {"": 16}))
    ours = layer(query=x, key=x, value=x)[0] if by_name else layer(x, x, x)[0]
    projected = (x @ layer.in_proj_weight.T).chunk(3, dim=-1)
    q, k, v = (part.view(3, 5, 2, 4).transpose(1, 2) for part in projected)
    mixed = scaled_dot_product_attention(q, k, v, scale=math.sqrt(16) / 4)
    torch.testing.assert_close(ours, layer.out_proj(mixed.transpose(1, 2).reshape(3, 5, 8)))


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.scaling = self.head_dim**-0.5


def test_an_attention_that_keeps_its_scale_in_an_attribute() -> None:
    layer = OwnAttention()
    assert head_sizes(layer) == {"": 4}
    scale_logits(layer, find_logit_scales(layer, {"": 16}))
    assert layer.scaling == pytest.approx(math.sqrt(16) / 4)
