"""Products of input and weight, folded: which of them have K and which are shared, in all useful mixtures."""

import pytest
import torch
import torch.nn.functional as F

from tests.fusion.rules.folding import SHARED, assert_folds, member, tensor


@pytest.mark.parametrize(("x", "w"), [(None, 0), (0, 0), (1, 0), (0, None), (1, None)])
def test_linear(x: int | None, w: int | None) -> None:
    assert_folds(F.linear, tensor(x, 4, 6, 5), tensor(w, 7, 5), tensor(w, 7), dims=(x, w, w))
    assert_folds(F.linear, tensor(x, 4, 5), tensor(w, 7, 5), dims=(x, w))
    assert_folds(F.linear, tensor(x, 4, 5), tensor(w, 7, 5), tensor(0, 7), dims=(x, w, 0))


def test_linear_of_one_sample() -> None:
    assert_folds(F.linear, torch.randn(5), member(7, 5), member(7), dims=(None, 0, 0))
    assert_folds(F.linear, member(5), member(7, 5), torch.randn(7), dims=(0, 0, None))


def test_linear_of_no_rows() -> None:
    assert_folds(F.linear, member(0, 5), member(7, 5), member(7), dims=(0, 0, 0))
    assert_folds(F.linear, torch.randn(0, 5), member(7, 5), dims=(None, 0))


@pytest.mark.parametrize("w", SHARED)
def test_addmm(w: int | None) -> None:
    assert_folds(torch.addmm, tensor(w, 7), tensor(0, 4, 5), tensor(w, 5, 7), dims=(w, 0, w))
    assert_folds(torch.addmm, tensor(0, 4, 7), tensor(0, 4, 5), tensor(w, 5, 7), dims=(0, 0, w))
