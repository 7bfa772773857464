"""Gradients inside an objective."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusedModel, FusionWarning, dry_run, fuse
from tests.fusion.training import assert_same_gradients

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def penalty(model: nn.Module, x: Tensor) -> Any:
    """Of a Wasserstein GAN: the input is each member's own, as it is drawn."""
    mixed = (x + torch.zeros_like(x) * next(model.parameters()).sum()).detach().requires_grad_(True)
    out = model(mixed)
    (slope,) = torch.autograd.grad(out, mixed, torch.ones_like(out), create_graph=True, retain_graph=True)
    return out.mean() + (slope.norm(dim=1) - 1).square().mean()


def of_the_batch(model: nn.Module, x: Tensor) -> Any:
    """By a tensor that all members share, which a statement makes a leaf."""
    points = x.clone()
    points.requires_grad_()
    (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    return (slope - points).square().mean()


def by_attribute(model: nn.Module, x: Tensor) -> Any:
    points = x.clone()
    points.requires_grad = True
    out = model(points)
    (slope,) = torch.autograd.grad([out.sum(), out.square().sum()], [points], create_graph=True)
    return slope.square().sum()


def without(model: nn.Module, x: Tensor) -> Any:
    """A tensor may be told once more that it needs no gradient."""
    return model(x.clone().requires_grad_(False)).square().mean()


def second_derivative(model: nn.Module, x: Tensor) -> Any:
    """Of a physics-informed network."""
    x = x.clone().requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (second[:, 0] + u[:, 0]).square().mean()


def one_step_ahead(model: nn.Module, x: Tensor) -> Any:
    """MAML: the loss of the weights after a step."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    loss = torch.func.functional_call(model, weights, x).square().mean()
    steps = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    ahead = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), steps, strict=True)}
    return torch.func.functional_call(model, ahead, x).square().mean()


def adversarial(model: nn.Module, x: Tensor) -> Any:
    """Without a graph: the gradient is only a direction."""
    moved = x.clone().requires_grad_(requires_grad=True)  # type: ignore[call-arg]
    (slope,) = torch.autograd.grad(model(moved).sum(), moved)
    return model(x + 0.1 * slope.sign()).square().mean()


def whole_jacobian(model: nn.Module, x: Tensor) -> Any:
    """All rows at once, of the first example's output."""
    points = x[0].clone().requires_grad_()
    out = model(points)
    rows = torch.eye(out.numel(), dtype=out.dtype)
    (jacobian,) = torch.autograd.grad(out, points, rows, create_graph=True, is_grads_batched=True)
    return jacobian.square().sum() + out.square().mean()


def by_a_shared_tensor(model: nn.Module, x: Tensor) -> Any:
    """A tensor that is made with its gradient, rather than asked for it later, is no member's own."""
    scale = torch.ones(x.shape[-1], requires_grad=True)
    (slope,) = torch.autograd.grad(model(x * scale).sum(), scale, create_graph=True)
    return slope.square().sum()


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def decayed(model: nn.Module, x: Tensor) -> Any:
    return model(x).square().mean() + sum(p.square().sum() for p in trained(model))


def sharpness_aware(model: nn.Module, x: Tensor) -> Any:
    """SAM (Foret et al. 2021): the loss of the weights after a step uphill."""
    slopes = torch.autograd.grad(model(x).square().mean(), trained(model))
    norm = sum((slope.square().sum() for slope in slopes), torch.zeros(())).sqrt()
    up = {name: p + 0.1 * g / norm for (name, p), g in zip(model.named_parameters(), slopes, strict=True)}
    return torch.func.functional_call(model, up, x).square().mean()


def clipped(model: nn.Module, x: Tensor) -> Any:
    """Of a Wasserstein GAN before gradient penalties (Arjovsky et al. 2017)."""
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)
    return model(x).mean()


OBJECTIVES = [
    *(penalty, of_the_batch, by_attribute, without, second_derivative, one_step_ahead, adversarial),
    *(decayed, sharpness_aware, clipped),
]


def assert_of_each_member(fused: FusedModel, objective: Callable[..., Any], models: Sequence[nn.Module]) -> None:
    loss_K = fused.map(objective, X)
    loss_K.sum().backward()
    for k, model in enumerate(models):
        loss = objective(model, X)
        loss.backward()
        torch.testing.assert_close(loss_K[k], loss)
    assert_same_gradients(fused, models)
    assert not X.requires_grad


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_inside_an_objective_are_those_of_each_member(objective: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    models = [net() for _ in range(3)]
    fused = fuse(models)
    assert dry_run(fused, objective, X) is None
    assert_of_each_member(fused, objective, models)


@pytest.mark.parametrize("objective", [whole_jacobian, by_a_shared_tensor])
def test_gradients_that_no_rule_folds_are_taken_one_member_after_another(objective: Callable[..., Any]) -> None:
    models = [net() for _ in range(3)]
    fused = fuse(models)
    with pytest.warns(FusionWarning, match="members train one after another"):
        obstacle = dry_run(fused, objective, X)
    assert obstacle is not None
    assert "torch.autograd.grad" in obstacle.code
    assert_of_each_member(fused, objective, models)
