"""Convolutions, folded into one of K groups."""

from typing import Any

import pytest
import torch.nn.functional as F

from tests.fusion.rules.folding import SHARED, assert_folds, member, tensor

CONVOLUTIONS: list[tuple[Any, dict[str, Any]]] = [
    (F.conv1d, {}),
    (F.conv2d, {}),
    (F.conv2d, {"stride": 2, "padding": 1}),
    (F.conv2d, {"dilation": 2, "padding": "same"}),
    (F.conv2d, {"groups": 4, "padding": (1, 0)}),
    (F.conv3d, {"padding": 1}),
]


@pytest.mark.parametrize("x", SHARED)
@pytest.mark.parametrize(("conv", "options"), CONVOLUTIONS)
def test_convolution(conv: Any, options: dict[str, Any], x: int | None) -> None:
    dims = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}[conv]
    weight = member(8, 4 // options.get("groups", 1), *[3] * dims)
    assert_folds(lambda *t: conv(*t, **options), tensor(x, 2, 4, *[7] * dims), weight, member(8), dims=(x, 0, 0))


@pytest.mark.parametrize(("x", "w", "channels"), [(None, 0, 1), (0, 0, 1), (1, 0, 4), (0, None, 4)])
def test_conv2d_in_other_layouts(x: int | None, w: int | None, channels: int) -> None:
    inputs = tensor(x, 2, channels, 6, 6), tensor(w, 5, channels, 3, 3)
    assert_folds(F.conv2d, *inputs, dims=(x, w))


@pytest.mark.parametrize("x", SHARED)
@pytest.mark.parametrize("options", [{}, {"stride": 2, "output_padding": 1}, {"groups": 2, "dilation": 2}])
def test_conv_transpose2d(options: dict[str, Any], x: int | None) -> None:
    weight = member(4, 3, 3, 3)
    bias = member(3 * options.get("groups", 1))
    assert_folds(lambda *t: F.conv_transpose2d(*t, **options), tensor(x, 2, 4, 5, 5), weight, bias, dims=(x, 0, 0))
