"""Clipping per member against `torch.nn.utils.clip_grad_norm_` for each alone."""

import pytest
import torch
from torch import nn

from fusion import FusedModel, clip_grad_norm_, fuse
from fusion.optim import FusedAdam
from tests.fusion.training import assert_same_gradients

LIMITS = [0.1, 1.0, 1e6, float("inf")]


def fused_with_gradients() -> tuple[FusedModel, list[nn.Module]]:
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 3)) for _ in LIMITS]
    fused, x = fuse(models), 10 * torch.randn(16, 4)
    fused(x).square().mean((1, 2)).sum().backward()
    for model in models:
        model(x).square().mean().backward()
    return fused, models


def test_equal_to_torch() -> None:
    fused, models = fused_with_gradients()
    norm_K = clip_grad_norm_(fused, LIMITS)
    for k, model in enumerate(models):
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMITS[k])
        torch.testing.assert_close(norm_K[k], norm)
    assert_same_gradients(fused, models)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_member_changes_no_bit_of_another(bad: float) -> None:
    fused, _ = fused_with_gradients()
    twin, _ = fused_with_gradients()
    grad = fused.stacked["0.weight"].grad
    assert grad is not None
    grad[1, 0, 0] = bad
    norm_K = clip_grad_norm_(fused, LIMITS)
    clip_grad_norm_(twin, LIMITS)
    assert not torch.isfinite(norm_K[1])
    for name, parameter in twin.stacked.items():
        ours, theirs = fused.stacked[name].grad, parameter.grad
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours[[0, 2, 3]], theirs[[0, 2, 3]])


def test_inf_clips_nothing() -> None:
    fused, _ = fused_with_gradients()
    before = {name: p.grad.clone() for name, p in fused.stacked.items() if p.grad is not None}
    clip_grad_norm_(fused, float("inf"))
    assert all(torch.equal(before[name], p.grad) for name, p in fused.stacked.items() if p.grad is not None)


def test_parameters_that_are_frozen_in_the_meantime_stay_where_they_are() -> None:
    """Clipping and the update put the same parameters in rows: none moves from step to step."""
    fused, _ = fused_with_gradients()
    opt = FusedAdam(fused, lr=0.01)
    opt.step()
    fused.stacked["0.weight"].requires_grad_(False)
    before = fused.changes
    for _ in range(2):
        opt.zero_grad()
        fused(torch.ones(2, 4)).sum().backward()
        clip_grad_norm_(fused, LIMITS)
        opt.step()
    assert fused.changes == before
    assert opt.steps_KP[0].tolist() == [1.0, 3.0, 3.0, 3.0, 3.0]


def test_without_gradients_norms_are_zero() -> None:
    assert clip_grad_norm_(fuse([nn.Linear(2, 2)] * 3), 1.0).tolist() == [0.0, 0.0, 0.0]


def test_errors() -> None:
    fused, _ = fused_with_gradients()
    with pytest.raises(ValueError, match="`max_norm` has shape"):
        clip_grad_norm_(fused, [1.0, 2.0])
    with pytest.raises(ValueError, match=r"`max_norm` is .* but must be >= 0"):
        clip_grad_norm_(fused, -1.0)


def test_a_norm_beyond_float16_beside_parameters_in_float32() -> None:
    models = [nn.ParameterList([torch.ones(2, dtype=torch.float16), torch.ones(3)]) for _ in range(2)]
    fused = fuse(models)
    for parameter in fused.stacked.values():
        parameter.grad = torch.full_like(parameter, 100.0)
    fused.stacked["1"].grad = torch.tensor([[1e6, 2e6, 0.0], [3.0, 4.0, 5.0]])
    for k, model in enumerate(models):
        for name, p in model.named_parameters():
            grad = fused.stacked[name].grad
            assert grad is not None
            p.grad = grad[k].clone()
    norm_K = clip_grad_norm_(fused, 1.0)
    for k, model in enumerate(models):
        torch.testing.assert_close(norm_K[k], nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert_same_gradients(fused, models)
