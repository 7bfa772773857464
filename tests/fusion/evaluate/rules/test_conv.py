"""Convolutions, folded into one of K groups, and pooling, folded into channels that lie side by side."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import fuse, fused_optimizer
from fusion.evaluate.rules import folded, kernel_inputs
from fusion.evaluate.rules.conv import convolution, transposed
from fusion.evaluate.rules.table import RULES
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import SHARED, K, assert_folds, member, tensor
from tests.zoo import CASES

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


GROUPS = 3  # the place of `groups` after the bias, in both


def mixing(conv: Any) -> Any:
    """A convolution whose groups are one, with zeros between them, as on a GPU's tensor cores."""

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        groups = options[GROUPS]
        own = weight.unflatten(0, (groups, -1)).unsqueeze(
            2
        )  # [G, out, 1, in, H, W]; transposed, in and out change places
        between = ~torch.eye(groups, dtype=torch.bool).view(groups, 1, groups, 1, 1, 1)
        dense = own.expand(-1, -1, groups, -1, -1, -1).masked_fill(between, 0.0).flatten(2, 3).flatten(0, 1)
        single = [*options[:GROUPS], 1, *options[GROUPS + 1 :]]
        result: Tensor = conv(x, dense, bias, *single)
        return result

    return convolve


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["batch-norm", "transposed", "resnet18", "group-norm"])
def test_no_member_reaches_another_where_kernels_mix_groups(
    name: str, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and weights, after one has diverged; without the rule's care they would be lost, too."""
    monkeypatch.setitem(RULES, F.conv2d, convolution(mixing(F.conv2d), 2))
    monkeypatch.setitem(RULES, F.conv_transpose2d, transposed(mixing(F.conv_transpose2d), 2))
    case = next(case for case in CASES if case.name == name)

    def train(cared_for: bool, poison: float | None) -> list[Tensor]:
        monkeypatch.setattr(kernel_inputs, "mixes_groups", lambda x: cared_for)
        torch.manual_seed(0)
        fused = fuse([case.build() for _ in range(3)])
        optimizer = fused_optimizer(fused, [{"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}] * 3)
        losses = []
        for step in range(4):
            if step == 1 and poison is not None:
                with torch.no_grad():
                    for p in fused.stacked.values():
                        p[1].fill_(poison)
            optimizer.zero_grad()
            loss_K = fused.map(case.objective, case.batch(step))
            loss_K.sum().backward()
            optimizer.step()
            losses.append(loss_K.detach())
        assert fused.diverged() == ([1] if cared_for and poison else fused.diverged())
        return [t.detach()[[0, 2]] for t in (*losses, *fused.stacked.values()) if t.is_floating_point()]

    healthy, sick = train(True, None), train(True, poison)
    for ours, theirs in zip(sick, healthy, strict=True):
        assert torch.equal(ours, theirs)
    assert any(t.isnan().any() for t in train(False, poison))


@pytest.mark.parametrize("sizes", [(2, -1), ((2, 4, 36),), (torch.Size([-1]),), (4, 2, 6, 6)])
def test_a_view_of_what_a_convolution_returns(sizes: tuple[Any, ...]) -> None:
    """Many models flatten like that before their first linear layer. Channels last, there is no such view."""
    inputs = torch.randn(2, 3, 8, 8), member(4, 3, 3, 3)
    assert_folds(lambda x, weight: F.conv2d(x, weight).relu().view(*sizes), *inputs, dims=(None, 0))


@pytest.mark.parametrize("size", [[2, 3, 4, 5], [2, 3, 4, 5, 6]])
def test_affine_grid(size: list[int]) -> None:
    rows = len(size) - 2
    assert_folds(lambda x: F.affine_grid(x, size, align_corners=False), member(2, rows, rows + 1), dims=(0,))


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
