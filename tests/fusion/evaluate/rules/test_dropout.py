"""Dropout, folded: each member with its own stream and probability."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.evaluate.rules import folded
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import K, assert_folds, member


def dropout(x: Tensor, p: Tensor) -> Tensor:
    return F.dropout(x, p)  # type: ignore[arg-type]


def test_dropout_with_a_probability_per_member() -> None:
    x, p = torch.ones(K, 40_000), torch.tensor([0.0, 0.25, 1.0])
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(dropout, randomness="error")(x, p)
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[2], torch.zeros_like(x[2]))
    torch.testing.assert_close(out[1].unique(), torch.tensor([0.0, 1 / 0.75]))
    assert (out[1] == 0).float().mean() == pytest.approx(0.25, abs=0.01)


def test_dropout_gradient_is_its_mask() -> None:
    x = torch.randn(K, 50, requires_grad=True)
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(dropout, randomness="error")(x, torch.tensor([0.3, 0.5, 1.0]))
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(out, x * grad)


def test_dropout_of_a_shared_input_differs_between_members() -> None:
    x = torch.ones(1000)
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(lambda w: F.dropout(x * w, 0.5), randomness="error")(torch.ones(K))
    assert not torch.equal(out[0], out[1])
    assert not torch.equal(out[1], out[2])


def test_dropout_does_nothing_in_evaluation() -> None:
    x = member(9)
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(lambda x, p: F.dropout(x, p, training=False))(x, torch.rand(K))
    assert torch.equal(out, x)


@pytest.mark.parametrize("inplace", [False, True])
def test_rrelu_in_evaluation_has_the_mean_slope(inplace: bool) -> None:
    assert_folds(lambda x: F.rrelu(x * 1, 0.1, 0.4, inplace=inplace), member(6, 5), dims=(0,))
