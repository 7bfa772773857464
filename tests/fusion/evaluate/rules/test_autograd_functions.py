"""Operators derived from `torch.autograd.Function`, without a rule for `vmap`: the rest of the model runs at once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from fusion import FusionWarning, dry_run, fuse
from tests.fusion.training import assert_same_gradients

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
APPLY = Function.apply


class Straight(Function):
    """A straight-through estimator (Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Reversed(Function):
    """A reversal of gradients, as in Ganin et al. 2016, by a factor in which members may differ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * g, None


class Split(Function):
    """In the newer form; it saves tensors, returns two, and draws random numbers."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return (x * weight).round(), torch.rand_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g * weight, (g * x).sum(0)


class Layers(nn.Module):
    def __init__(self, kind: str, factor: float) -> None:
        super().__init__()
        self.layer, self.head, self.weight = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.randn(4))
        self.kind, self.factor = kind, factor
        self.double()

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        if self.kind == "straight":
            return self.head(Straight.apply(h) + h)
        if self.kind == "reversed":
            return self.head(Reversed.apply(h, self.factor))
        rounded, noise = Split.apply(h, self.weight)
        return self.head(rounded * noise)


@pytest.mark.parametrize("kind", ["straight", "reversed", "split"])
def test_members_are_as_alone(kind: str) -> None:
    torch.manual_seed(0)
    models = [Layers(kind, 0.1 * (k + 1)) for k in range(3)]
    fused = fuse(models)
    assert dry_run(fused, lambda model, x: model(x).square().mean(), X) is None
    fused.seed(range(3))
    fused(X).square().sum().backward()
    for k, model in enumerate(models):
        torch.manual_seed(k)
        model(X).square().sum().backward()
    assert_same_gradients(fused, models)
    assert Function.apply == APPLY


WEIGHT = [torch.ones(())]


class Scaled(Function):
    """It computes with a weight that is none of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * WEIGHT[0].sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Any:
        WEIGHT[0] = self.layer.weight.detach()
        return Scaled.apply(self.layer(x))


def test_a_function_that_sees_a_weight_of_the_model_is_told() -> None:
    fused = fuse([Seeing(), Seeing()])
    with pytest.warns(FusionWarning, match="computes with a tensor of the model: hand it to `apply`"):
        dry_run(fused, lambda model, x: model(x).square().mean(), X)
    assert fused.one_by_one
