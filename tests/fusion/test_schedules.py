"""Schedules against `torch.optim.lr_scheduler`, stepped once an epoch."""

from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, LRScheduler, StepLR

from fusion import lr_factor

T = 12


@pytest.mark.parametrize(
    ("config", "oracle"),
    [
        ({}, lambda opt: LambdaLR(opt, lambda _: 1.0)),
        ({"schedule": "cosine"}, lambda opt: CosineAnnealingLR(opt, T_max=T)),
        ({"schedule": "step", "step_size": 5, "gamma": 0.3}, lambda opt: StepLR(opt, 5, 0.3)),
        ({"schedule": "step", "step_size": 4}, lambda opt: StepLR(opt, 4)),
        ({"schedule": "exponential", "gamma": 0.7}, lambda opt: ExponentialLR(opt, 0.7)),
    ],
)
def test_equal_to_torch(config: dict[str, Any], oracle: Any) -> None:
    opt = SGD([torch.zeros(1)], lr=1.0)
    scheduler: LRScheduler = oracle(opt)
    for epoch in range(T + 1):
        expected = opt.param_groups[0]["lr"]
        assert lr_factor(config, epoch, T) == pytest.approx(expected, abs=1e-12)
        assert lr_factor(config, epoch + 0.99, T) == pytest.approx(expected, abs=1e-12)
        opt.step()
        scheduler.step()


def test_warmup_rises_in_a_line_and_multiplies_the_decay() -> None:
    config = {"schedule": "exponential", "gamma": 0.5, "warmup_epochs": 2.5}
    assert lr_factor(config, 0, T) == 0
    assert lr_factor(config, 0.5, T) == pytest.approx(0.5 / 2.5)
    assert lr_factor(config, 2.0, T) == pytest.approx(2.0 / 2.5 * 0.5**2)
    assert lr_factor(config, 2.5, T) == pytest.approx(0.5**2)


def test_warmup_equals_torchs_linear_one_at_whole_epochs() -> None:
    """`LinearLR` cannot start at 0, so it starts next to it."""
    opt = SGD([torch.zeros(1)], lr=1.0)
    scheduler = LinearLR(opt, start_factor=1e-12, total_iters=4)
    for epoch in range(8):
        assert lr_factor({"warmup_epochs": 4}, epoch, T) == pytest.approx(opt.param_groups[0]["lr"], abs=1e-11)
        opt.step()
        scheduler.step()


def test_cosine_stays_at_zero_past_the_end() -> None:
    assert lr_factor({"schedule": "cosine"}, T + 3, T) == 0


@pytest.mark.parametrize(
    ("config", "epoch", "match"),
    [
        ({"schedule": "poly"}, 0, "schedule is 'poly', but must be one of constant, cosine, step, exponential"),
        ({"schedule": "step", "step_size": 0}, 0, "step_size is 0, but must be >= 1"),
        ({"schedule": "exponential", "gamma": 0.0}, 0, "gamma is 0.0, but must be > 0"),
        ({"warmup_epochs": -1}, 0, "warmup_epochs is -1.0, but must be >= 0"),
        ({}, -1, "epoch is -1"),
    ],
)
def test_errors(config: dict[str, Any], epoch: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lr_factor(config, epoch, T)
