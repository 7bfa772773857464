"""Slices of parameter lists in a fused model have the members' tensors, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusion import dry_run, fuse
from tests.fusion.training import assert_same_gradients

X = torch.randn(5, 3)


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(3), 0.5, torch.randn(3), torch.randn(3)])

    def forward(self, x: Tensor) -> Tensor:
        part = self.scales[:-1]
        assert isinstance(part, nn.ParameterList)
        assert len(list(part.parameters())) == 2
        for scale in part:
            x = x * scale
        last: Tensor = part[::2][1]
        return x + last


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


@pytest.mark.parametrize(("K", "one_by_one"), [(1, False), (3, False), (3, True)])
def test_gradients_reach_the_members(K: int, one_by_one: bool) -> None:
    models = [Sliced() for _ in range(K)]
    fused = fuse(models, one_by_one=one_by_one)
    assert dry_run(fused, loss, X) is None
    loss_K = fused.map(loss, X)
    loss_K.sum().backward()
    losses = [loss(model, X) for model in models]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(loss_K, torch.stack(losses))
    assert_same_gradients(fused, models)


def test_other_lists_are_sliced_as_by_torch() -> None:
    own = nn.ParameterList([torch.randn(3), torch.randn(3)])

    def objective(model: nn.Module, x: Tensor) -> Tensor:
        assert own[1:][0] is own[1]
        with pytest.raises(IndexError):
            own[2]
        return loss(model, x)

    assert fuse([Sliced(), Sliced()]).map(objective, X).shape == (2,)
