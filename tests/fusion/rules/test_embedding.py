"""Embedding, folded into one table."""

import pytest
import torch
import torch.nn.functional as F

from tests.fusion.rules.folding import SHARED, K, assert_folds, member


@pytest.mark.parametrize("index", SHARED)
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding(padding_idx: int | None, index: int | None) -> None:
    indices = torch.randint(0, 9, (4, 5) if index is None else (K, 4, 5))
    indices[..., 0] = 2
    indices[..., 1] = 8
    assert_folds(lambda i, w: F.embedding(i, w, padding_idx), indices, member(9, 6), dims=(index, 0))
