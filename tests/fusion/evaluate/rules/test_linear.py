"""Products of input and weight, folded: which of them have K and which are shared, in all useful mixtures."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fusion.evaluate.rules.folding import SHARED, assert_folds, assert_modules_fold, member, tensor


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


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("multiply", [torch.sparse.mm, torch.spmm, torch.matmul, lambda a, x: a @ x])
def test_a_sparse_matrix_that_members_share(multiply: Any) -> None:
    """As of a graph; torch would refuse `@`, and loop over the members in `torch.sparse.mm`."""
    edges = (torch.rand(4, 6) > 0.5).float()
    for sparse in (edges.to_sparse(), edges.to_sparse_csr()):
        assert_folds(lambda x: multiply(sparse, x), member(6, 5), dims=(0,))  # noqa: B023
    assert_folds(lambda x: edges.to_sparse() @ x, member(6), dims=(0,))


@pytest.mark.parametrize("bias", [True, False])
def test_bilinear(bias: bool) -> None:
    layer, inputs = partial(nn.Bilinear, 3, 4, 5, bias=bias), [torch.randn(6, 2, 3), torch.randn(6, 2, 4)]
    assert_modules_fold(layer, inputs, {})
