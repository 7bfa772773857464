"""Schedules against `torch.optim.lr_scheduler`, stepped once an epoch."""

from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    StepLR,
)

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
    factors = [lr_factor(config, step / 2, T, steps_per_epoch=2) for step in range(6)]
    assert factors == pytest.approx([0.2, 0.4, 0.6 * 0.5, 0.8 * 0.5, 0.25, 0.25])


@pytest.mark.parametrize("steps", [1, 7])
def test_warmup_equals_torchs_linear_one_at_every_step(steps: int) -> None:
    n = 3 * steps
    opt = SGD([torch.zeros(1)], lr=1.0)
    scheduler = LinearLR(opt, start_factor=1 / n, total_iters=n - 1)
    for step in range(n + steps):
        factor = lr_factor({"warmup_epochs": 3}, step // steps + step % steps / steps, T, steps)
        assert factor == pytest.approx(opt.param_groups[0]["lr"], abs=1e-12)
        assert factor > 0
        opt.step()
        scheduler.step()


def test_a_function_is_asked_at_every_step() -> None:
    """As a schedule of the `transformers` library: its first step is at 0."""
    steps, warmup = 5, 7

    def linear(step: int, total: int) -> float:
        return step / warmup if step < warmup else (total - step) / (total - warmup)

    opt = SGD([torch.zeros(1)], lr=1.0)
    scheduler = LambdaLR(opt, lambda step: linear(step, T * steps))
    for step in range(T * steps):
        factor = lr_factor({"schedule": linear}, step // steps + step % steps / steps, T, steps)
        assert factor == pytest.approx(opt.param_groups[0]["lr"], abs=1e-12)
        opt.step()
        scheduler.step()


@pytest.mark.parametrize("steps", [1, 4, 7])
@pytest.mark.parametrize(
    ("schedule", "oracle"),
    [
        ("linear", lambda opt, total: LinearLR(opt, 1.0, 0.0, total_iters=total)),
        ("one_cycle", lambda opt, total: OneCycleLR(opt, 1.0, total_steps=total, cycle_momentum=False)),
    ],
)
def test_step_by_step_equal_to_torch(schedule: str, oracle: Any, steps: int) -> None:
    opt = SGD([torch.zeros(1)], lr=1.0)
    scheduler = oracle(opt, T * steps)
    for step in range(T * steps):
        factor = lr_factor({"schedule": schedule}, step // steps + step % steps / steps, T, steps)
        assert factor == pytest.approx(opt.param_groups[0]["lr"], abs=1e-12)
        opt.step()
        if step + 1 < T * steps:
            scheduler.step()


@pytest.mark.parametrize("total", [1, 2, 3])
def test_one_cycle_of_few_steps_is_defined(total: int) -> None:
    assert all(0 <= lr_factor({"schedule": "one_cycle"}, step, total) <= 1 for step in range(total + 1))


def test_cosine_stays_at_zero_past_the_end() -> None:
    assert lr_factor({"schedule": "cosine"}, T + 3, T) == 0


@pytest.mark.parametrize(
    ("config", "epoch", "match"),
    [
        (
            {"schedule": "poly"},
            0,
            "`schedule` is 'poly', but must be one of constant, cosine, step, exponential",
        ),
        ({"schedule": lambda step, steps: -1.0}, 0, r"`schedule\(step, steps\)` is -1.0, but must be a finite number"),
        ({"schedule": "step", "step_size": 0}, 0, "`step_size` is 0, but must be a number of epochs >= 1"),
        ({"schedule": "exponential", "gamma": 0.0}, 0, r"`gamma` is 0.0, but must be in \(0, 1\]"),
        ({"warmup_epochs": -1}, 0, "`warmup_epochs` is -1, but must be a finite number of epochs >= 0"),
        ({}, -1, "`epoch` is -1"),
    ],
)
def test_errors(config: dict[str, Any], epoch: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lr_factor(config, epoch, T)


def test_an_epoch_has_at_least_one_step() -> None:
    with pytest.raises(ValueError, match=r"`steps_per_epoch` is 0\.5, but must be >= 1"):
        lr_factor({}, 0, T, 0.5)


def test_a_key_that_the_schedule_has_no_use_for_is_the_users_own() -> None:
    assert lr_factor({"gamma": "rbf", "step_size": None, "schedule": "cosine"}, 0, T) == 1
