"""Writes in place, by masks and into new tensors: each member writes to its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusionWarning, dry_run, fuse
from tests.fusion.training import assert_same_gradients

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SOURCES, TARGETS = torch.tensor([0, 1, 2, 3, 5]), torch.tensor([1, 2, 3, 0, 4])


class Writes(nn.Module):
    def __init__(self, value: float, write: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.value, self.write = nn.Linear(4, 4), nn.Linear(4, 2), value, write
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.write(x, self.layer(x).tanh() * 1, self.value))


def by_masks(x: Tensor, z: Tensor, value: float) -> Tensor:
    z[z < 0] = value
    z[z.sum(1) > 0.5] = 0.5
    z[:, 0][z[:, 1] > 0] = 2
    z[z > 0.9] = z.mean()
    few = z.detach() > 0
    few[few.sum(1) > 3] = False
    return z * few


def row_by_row(x: Tensor, z: Tensor, value: float) -> Tensor:
    rows = torch.zeros(6, 4, dtype=x.dtype)
    for i in range(6):
        rows[i] = z[i]
    rows += z
    return rows


def messages(x: Tensor, z: Tensor, value: float) -> Tensor:
    """Of a graph network."""
    received = torch.zeros_like(x).index_add_(0, TARGETS, z[SOURCES])
    return x + received


def hidden_inputs(x: Tensor, z: Tensor, value: float) -> Tensor:
    """Of a masked autoencoder: the mask is each member's own, and so is the copy; the batch stays as it is."""
    seen = x.clone()
    seen[z > 0] = value
    left = torch.full_like(x, 2.0)
    left -= z
    return seen * left + x


def any_new_tensor(x: Tensor, z: Tensor, value: float) -> Tensor:
    """Whatever made it: a copy, a list, another type, arithmetic."""
    listed, counted = torch.tensor([[0.0] * 4] * 6), torch.arange(24).view(6, 4) * 1.0
    cast, joined = torch.zeros(6, 4).to(x.dtype), torch.stack([torch.ones(4)] * 6)
    for new in (listed, counted, cast, joined):
        new += z
    return listed + counted * cast + joined


def by_operators(x: Tensor, z: Tensor, value: float) -> Tensor:
    """By the operators of Python that write to their left side."""
    rest, times = (torch.full_like(x, 2.0) for _ in range(2))
    rest %= 1.5 + z.detach()
    times //= 0.5 + z.detach().abs()
    both, either, one = (torch.arange(24).view(6, 4) % 2 == 0 for _ in range(3))
    both &= z > 0
    either |= z > 0
    one ^= z > 0
    return z * both + z.square() * either + rest * one + times


def at_an_index(x: Tensor, z: Tensor, value: float) -> Tensor:
    """By torch alone, what is written would have the gradient of another place."""
    rows = torch.select_scatter(x, z[0] * value, 0, -2)
    return z.select_scatter(rows[:, 1], -1, 2)


def through_no_views(x: Tensor, z: Tensor, value: float) -> Tensor:
    ones = torch.ones(6, 4, dtype=x.dtype)
    return ones[:, :2].repeat(1, 2) * z + ones


def stale_view(x: Tensor, z: Tensor, value: float) -> Tensor:
    whole = torch.zeros(6, 4, dtype=x.dtype)
    part = whole[:, :2]
    whole += z
    return torch.cat([whole[:, 2:], part], 1)


def stale_view_of_the_second(x: Tensor, z: Tensor, value: float) -> Tensor:
    whole = torch.linspace(0, 1, 4, dtype=x.dtype)
    seen: Tensor = torch.broadcast_tensors(torch.ones(6, 4), whole)[1]
    whole += z[0]
    return seen + whole + z


def same(write: Callable[..., Tensor], fused_at_once: bool) -> None:
    torch.manual_seed(0)
    models = [Writes(value, write) for value in (0.1, 0.3, 0.2)]
    fused = fuse(models)
    batch = X.clone()
    assert (dry_run(fused, lambda model, x: model(x).square().mean(), batch) is None) == fused_at_once
    fused(batch).square().sum().backward()
    torch.testing.assert_close(batch, X, rtol=0, atol=0)
    for model in models:
        model(X).square().sum().backward()
    assert_same_gradients(fused, models)


WRITES = [
    *(by_masks, row_by_row, messages, hidden_inputs, any_new_tensor, by_operators, at_an_index, through_no_views),
]


@pytest.mark.parametrize("write", WRITES)
def test_members_write_to_their_own(write: Callable[..., Tensor]) -> None:
    same(write, True)


@pytest.mark.parametrize("write", [stale_view, stale_view_of_the_second])
def test_a_view_of_a_tensor_that_members_share_is_written_to_one_by_one(write: Callable[..., Tensor]) -> None:
    """It would not see the members' own."""
    with pytest.warns(FusionWarning, match="writes members' values into a tensor that they share"):
        same(write, False)


class Filled(nn.Module):
    """Returns a new tensor that it has written to, and keeps another one as a buffer."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        rows, self.kept = torch.zeros(6, 4, dtype=x.dtype), torch.zeros(4, dtype=x.dtype)
        rows[0] = h[0]
        self.kept.add_(h.detach()[1])
        return rows


def test_new_tensors_that_are_returned_or_kept_hold_what_each_member_wrote() -> None:
    models = [Filled() for _ in range(3)]
    fused = fuse(models)
    rows_K = fused(X)
    rows_K.square().sum().backward()
    for k, model in enumerate(models):
        rows = model(X)
        rows.square().sum().backward()
        torch.testing.assert_close(rows_K[k], rows)
        torch.testing.assert_close(fused.unfuse(k).get_buffer("kept"), model.kept)
    assert_same_gradients(fused, models)
