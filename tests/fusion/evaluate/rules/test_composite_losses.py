"""Losses that torch would compute in a loop over the members, or that decide by values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import dry_run, fuse
from fusion.evaluate.rules import folded
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import K, assert_folds, member


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


SIGN = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda x, **old: F.cross_entropy(x, torch.arange(6) % 5, **old),
    "kl_div": lambda x, **old: F.kl_div(x.log_softmax(1), torch.full((6, 5), 0.2), **old),
    "margin_ranking": lambda x, **old: F.margin_ranking_loss(x[:, 0], x[:, 1], SIGN, 0.1, **old),
    "triplet_margin": lambda x, **old: F.triplet_margin_loss(x, x.flip(0), x.roll(1, 0), **old),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("old", [{"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}])
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated", "ignore:reduction")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_reductions_of_old_torch(loss: str, old: dict[str, Any]) -> None:
    assert_folds(lambda x: LOSSES[loss](x, **old), member(6, 5), dims=(0,))


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "axes of a ranking": (
        lambda x: F.margin_ranking_loss(x, x, SIGN),
        "margin_ranking_loss : All input tensors should have same dimension",
    ),
    "axes of triplets": (
        lambda x: F.triplet_margin_loss(x, x, x[0]),
        "anchor, positive, and negative .* same number of dimensions",
    ),
    "margin of triplets": (lambda x: F.triplet_margin_loss(x, x, x, margin=0), "margin must be greater than 0"),
    "size of a variance": (lambda x: F.gaussian_nll_loss(x, x, x[:, :3].square()), "var is of incorrect size"),
    "axes of a variance": (lambda x: F.gaussian_nll_loss(x, x, x[0].square()), "var is of incorrect size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_torch_refuses_are_torchs_error(name: str) -> None:
    loss, told = REFUSED[name]
    with folded(Streams(K)), pytest.raises((RuntimeError, ValueError), match=told):
        torch.func.vmap(loss)(member(6, 5))


@pytest.mark.parametrize("loss", ["kl_div", "margin_ranking", "triplet_margin"])
def test_an_unknown_reduction_is_torchs_error(loss: str) -> None:
    with folded(Streams(K)), pytest.raises(ValueError, match="avg is not a valid value for reduction"):
        torch.func.vmap(lambda x: LOSSES[loss](x, reduction="avg"))(member(6, 5))
