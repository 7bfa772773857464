"""Pooling, folded into channels that lie side by side."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.evaluate.rules import folded
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import K, assert_folds, member


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d])
def test_pooling_of_neighbouring_channels(pool: Any) -> None:
    def op(x: Tensor, weight: Tensor) -> Any:
        return pool(F.conv2d(x, weight), 2)

    inputs = torch.randn(2, 3, 8, 8), member(4, 3, 3, 3)
    assert_folds(op, *inputs, dims=(None, 0))
    assert_folds(lambda x: pool(x, 2), member(2, 4, 6, 6), dims=(0,))


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(4, affine=False)]
)
def test_channels_of_all_members_stay_side_by_side(pool: nn.Module) -> None:
    def op(x: Tensor, weight: Tensor) -> Any:
        return pool(F.relu(F.conv2d(x, weight)))

    pool.eval()
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(op, in_dims=(None, 0), out_dims=1)(torch.randn(2, 1, 8, 8), member(4, 1, 3, 3))
    assert out.flatten(1, 2).is_contiguous(memory_format=torch.channels_last)


def test_max_pool2d_with_indices_is_torchs_own() -> None:
    def op(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2, return_indices=True)[1].float()

    x = member(2, 4, 6, 6)
    with folded(Streams(K, range(K))):
        assert torch.equal(torch.func.vmap(op)(x), torch.stack([op(row) for row in x]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dims", [1, 2])
def test_a_mean_over_places_of_channels_that_come_last_is_folded(dims: int) -> None:
    """As at the end of a Swin; torch would go member by member, and warn of it."""
    pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[dims - 1]

    def op(x: Tensor) -> Any:
        return pool(x.movedim(-1, 1), 1)

    assert_folds(op, member(2, *(3, 5)[:dims], 4), dims=(0,))
