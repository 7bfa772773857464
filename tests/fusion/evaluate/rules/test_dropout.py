"""Dropout and leaky ReLU, folded; `test_per_member_floats.py` and `test_streams.py` have more of both."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import fuse
from fusion.evaluate.rules import folded
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import K, assert_folds, member


def dropout(x: Tensor, p: Tensor) -> Tensor:
    return F.dropout(x, p)  # type: ignore[arg-type]


def test_dropout_gradient_is_its_mask() -> None:
    x = torch.randn(K, 50, requires_grad=True)
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(dropout, randomness="error")(x, torch.tensor([0.3, 0.5, 1.0]))
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(out, x * grad)
    assert not grad[2].any(), "the last member's probability is 1"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_members_with_probabilities_of_their_own_scale_half_precision_as_torch(dtype: torch.dtype) -> None:
    """Torch divides by 1 - p in single precision."""
    probabilities = [i / 20 for i in range(1, 20)]
    fused = fuse([nn.Dropout(p) for p in probabilities])
    fused.seed(range(len(probabilities)))
    x = torch.ones(64, dtype=dtype)
    out_K = fused(x)
    for k, p in enumerate(probabilities):
        torch.manual_seed(k)
        assert torch.equal(out_K[k], F.dropout(x, p)), p


@pytest.mark.parametrize("inplace", [False, True])
def test_rrelu_in_evaluation_has_the_mean_slope(inplace: bool) -> None:
    assert_folds(lambda x: F.rrelu(x * 1, 0.1, 0.4, inplace=inplace), member(6, 5), dims=(0,))


def test_dropout_in_evaluation_leaves_an_input_shared() -> None:
    x = torch.randn(5)
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(lambda x, p: F.dropout(x, p, False), in_dims=(None, 0))(x, torch.rand(K))
    assert torch.equal(out, x.expand(K, 5))
