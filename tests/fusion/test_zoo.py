"""K fused members equal K separate runs, for every model of the zoo: losses, weights, buffers, both modes.

In float64, so that gradients which are zero but for rounding (the bias of an attention's keys) stay what they are when
Adam divides them by themselves.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fusion import fuse, fused_optimizer
from fusion.optim import optimizer
from tests.fusion.training import assert_same_states
from tests.zoo import CASES, DEVICES, Case

CONFIGS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    {"optimizer": "adam", "lr": 0.01, "beta1": 0.8},
    {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.1},
]
close = functools.partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9)


pytestmark = pytest.mark.gpu
on_each = pytest.mark.parametrize("device", DEVICES)


def build(case: Case, device: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [case.build().double().to(device) for _ in CONFIGS]


def batch_of(case: Case, seed: int, device: str) -> tuple[Tensor, Tensor]:
    x, y = case.batch(seed)
    return (x.double() if x.is_floating_point() else x).to(device), y.to(device)


def some_of(quick: set[str]) -> pytest.MarkDecorator:
    """All models, of which few are quick: the operators of each are in the test that has all of them."""
    cases = [pytest.param(case, marks=[pytest.mark.slow] * (case.name not in quick)) for case in CASES]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@on_each
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fused_equals_separate(case: Case, device: str) -> None:
    check(case, build(case, device), device, one_by_one=False)


@on_each
@some_of({"mlp", "batch-norm", "transformer", "lstm", "tied", "peculiar", "gpt2"})
def test_members_one_by_one_equal_separate_runs(case: Case, device: str) -> None:
    check(case, build(case, device), device, one_by_one=True)


@on_each
@some_of({"mlp", "batch-norm", "transformer", "lstm", "tied", "peculiar", "gpt2"})
def test_a_single_member_equals_the_module(case: Case, device: str) -> None:
    check(case, build(case, device)[2:], device, one_by_one=False)


@on_each
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_members_with_batches_of_their_own_equal_separate_runs(case: Case, device: str) -> None:
    check(case, build(case, device), device, one_by_one=False, own_data=True)


def check(case: Case, models: list[nn.Module], device: str, one_by_one: bool, own_data: bool = False) -> None:
    fused = fuse(models, one_by_one=one_by_one)
    configs = CONFIGS[-len(models) :]
    opt = fused_optimizer(fused, configs)
    alone = [optimizer(model, config) for model, config in zip(models, configs, strict=True)]
    for step in range(3):
        batches = [batch_of(case, step + 10 * k * own_data, device) for k in range(fused.K)]
        batch = tree_map(lambda *rows: torch.stack(rows), *batches) if own_data else batches[0]
        opt.zero_grad()
        loss_K = fused.map(case.objective, batch, own_data)
        loss_K.sum().backward()
        opt.step()
        for k, (model, own) in enumerate(zip(models, alone, strict=True)):
            own.zero_grad()
            loss = case.objective(model, batches[k])
            loss.backward()
            own.step()
            close(loss_K[k], loss)
    assert_same_states(fused, models, close)
    fused.eval()
    with torch.no_grad():
        loss_K = fused.map(case.objective, batch_of(case, 9, device))
        for k, model in enumerate(models):
            close(loss_K[k], case.objective(model.eval(), batch_of(case, 9, device)))
    assert_same_states(fused, models, close)
