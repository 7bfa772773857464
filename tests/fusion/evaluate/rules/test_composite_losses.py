"""Losses that torch would compute in a loop over the members, or that decide by values."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import dry_run, fuse
from tests.fusion.evaluate.rules.folding import assert_folds, member


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "batchmean"])
@pytest.mark.filterwarnings("ignore:reduction")
def test_kl_div(reduction: str, log_target: bool) -> None:
    target = torch.rand(6, 5)
    target[2, 3] = 0

    def op(x: Tensor, t: Tensor) -> Tensor:
        t = t.log_softmax(1) if log_target else t
        return F.kl_div(x.log_softmax(1), t, reduction=reduction, log_target=log_target)

    assert_folds(lambda x: op(x, target), member(6, 5), dims=(0,))
    assert_folds(op, member(6, 5), member(6, 5).softmax(2), dims=(0, 0))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_linear_cross_entropy(chunk: int | None, reduction: str) -> None:
    """Also in chunks, in which torch's own has no gradient by the members' inputs and weights."""
    options = None if chunk is None else torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    target = torch.tensor([0, 2, -100, 1, 0, 2])

    def op(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction, options=options)

    assert_folds(op, member(6, 5), member(3, 5), member(3), dims=(0, 0, 0))
    assert_folds(op, torch.randn(6, 5), member(3, 5), member(3), dims=(None, 0, 0))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(6, 5), (6, 1), (6,)])
def test_gaussian_nll(shape: tuple[int, ...], full: bool, reduction: str) -> None:
    """Of variances of which some are below `eps`."""

    def op(x: Tensor, t: Tensor, v: Tensor) -> Tensor:
        return F.gaussian_nll_loss(x, t, v.abs(), full=full, eps=0.3, reduction=reduction)

    assert_folds(op, member(6, 5), torch.randn(6, 5), member(*shape), dims=(0, None, 0))


def test_a_variance_below_0_is_refused() -> None:
    fused = fuse([torch.nn.Linear(5, 5) for _ in range(2)])
    with pytest.raises(ValueError, match="var has negative"):
        fused.map(lambda model, x: F.gaussian_nll_loss(model(x), x, model(x) - 99), torch.ones(6, 5))


def test_a_model_of_mean_and_variance_trains_at_once() -> None:
    def objective(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        mean, spread = model(batch[0]).chunk(2, 1)
        return F.gaussian_nll_loss(mean, batch[1], F.softplus(spread))

    fused = fuse([torch.nn.Linear(4, 2) for _ in range(3)])
    assert dry_run(fused, objective, (torch.randn(8, 4), torch.randn(8, 1))) is None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_margin_ranking_and_triplets(reduction: str) -> None:
    sign = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0])

    def rank(x: Tensor) -> Tensor:
        return F.margin_ranking_loss(x[:, 0], x[:, 1], sign, 0.1, reduction=reduction)

    def triplets(x: Tensor, y: Tensor, swap: bool = False) -> Tensor:
        return F.triplet_margin_loss(x, y, x.roll(1, 0), swap=swap, p=1.5, reduction=reduction)

    assert_folds(rank, member(6, 2), dims=(0,))
    assert_folds(triplets, member(6, 5), torch.randn(6, 5), dims=(0, None))
    assert_folds(lambda x, y: triplets(x, y, swap=True), member(6, 5), member(6, 5), dims=(0, 0))
