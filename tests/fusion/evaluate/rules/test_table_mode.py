"""The mode that sends operators to their rules, in company of other modes and transforms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.evaluate.rules import folded
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import K, member


def test_autocast_reaches_the_folded_operators() -> None:
    x, weight, bias = torch.randn(4, 5), member(7, 5), member(7)
    with folded(Streams(K)), torch.autocast("cpu", torch.bfloat16):
        out = torch.func.vmap(F.linear, in_dims=(None, 0, 0))(x, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        loop = torch.stack([F.linear(x, w, b) for w, b in zip(weight, bias)])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, loop)


def test_no_grad_records_nothing() -> None:
    weight = member(7, 5).requires_grad_()
    with folded(Streams(K)), torch.no_grad():
        out = torch.func.vmap(F.linear, in_dims=(None, 0))(torch.randn(4, 5), weight)
    assert not out.requires_grad


def test_nested_transforms_run_as_torch_runs_them() -> None:
    weight, x = member(5), torch.randn(4, 5)

    def loss(w: Tensor) -> Tensor:
        return F.linear(x, w[None]).pow(2).sum()

    with folded(Streams(K, range(K))):
        grads = torch.func.vmap(torch.func.grad(loss))(weight)
    expected = torch.stack([torch.func.grad(loss)(w) for w in weight])
    torch.testing.assert_close(grads, expected)


def test_outside_of_vmap_nothing_changes() -> None:
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    with folded(Streams(K, range(K))):
        out, _ = attention(x, x, x)
    torch.testing.assert_close(out, attention(x, x, x)[0])
