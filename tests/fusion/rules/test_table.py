"""The operators that fast rules take."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.rules.member import fold
from fusion.rules.table import DRAWING_RULES, RULES
from fusion.streams import Streams
from tests.fusion.rules.folding import K, member

TAKEN: list[tuple[Any, tuple[Any, ...]]] = [
    (F.linear, (torch.randn(4, 5), member(7, 5))),
    (F.conv2d, (torch.randn(2, 3, 6, 6), member(4, 3, 3, 3))),
    (F.group_norm, (member(2, 4, 6), 2)),
    (F.scaled_dot_product_attention, (torch.randn(2, 4, 5, 8), *[member(2, 4, 5, 8)] * 2)),
    (F.embedding, (torch.tensor([1, 2]), member(4, 3))),
    (F.cross_entropy, (member(2, 3), torch.tensor([1, 2]))),
    (torch.max_pool2d, (torch.randn(2, 5, 5, 3, 4).permute(3, 0, 4, 1, 2), 2)),
]


@pytest.mark.parametrize(("function", "args"), TAKEN)
def test_a_rule_takes_the_operator(function: Any, args: tuple[Any, ...]) -> None:
    def op(*tensors: Any) -> Any:
        rule = RULES.get(function) or partial(DRAWING_RULES[function], streams=Streams(K))
        result = fold(rule, tensors, {})
        assert result is not NotImplemented
        return result

    has_K = [isinstance(a, Tensor) and a.dim() > 1 and a.shape[0] == K for a in args]
    torch.func.vmap(op, in_dims=tuple(0 if h else None for h in has_K))(*args)
