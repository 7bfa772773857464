"""Schedules against `torch.optim.lr_scheduler` and `transformers`."""

from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from fusion import lr_factor
from fusion.optim.schedules import as_lambda_lr

T = 12


@pytest.mark.parametrize(
    ("config", "oracle"),
    [
        ({}, lambda opt: LambdaLR(opt, lambda _: 1.0)),
        ({"schedule": "step", "step_size": 5, "gamma": 0.3}, lambda opt: StepLR(opt, 5, 0.3)),
        ({"schedule": "step", "step_size": 4}, lambda opt: StepLR(opt, 4)),
        ({"schedule": "exponential", "gamma": 0.7}, lambda opt: ExponentialLR(opt, 0.7)),
    ],
)
def test_by_epoch_equal_to_torch(config: dict[str, Any], oracle: Any) -> None:
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
        ("cosine", lambda opt, total: CosineAnnealingLR(opt, T_max=total)),
        ("one_cycle", lambda opt, total: OneCycleLR(opt, 1.0, total_steps=total, cycle_momentum=False)),
    ],
)
def test_step_by_step_equal_to_torch(schedule: str, oracle: Any, steps: int) -> None:
    assert factors({"schedule": schedule}, steps) == pytest.approx(lrs(oracle, T * steps), abs=1e-12)


def factors(config: dict[str, Any], steps: int) -> list[float]:
    """Those of a training of T epochs, step by step."""
    return [lr_factor(config, step // steps + step % steps / steps, T, steps) for step in range(T * steps)]


def lrs(oracle: Any, total: int) -> list[float]:
    """What `oracle(optimizer, total)` makes of a learning rate of 1, step by step."""
    opt = SGD([torch.zeros(1)], lr=1.0)
    scheduler, found = oracle(opt, total), []
    for _ in range(total):
        found.append(opt.param_groups[0]["lr"])
        opt.step()
        if len(found) < total:
            scheduler.step()
    return found


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_warmup_plateau_and_decay_are_torchs_in_sequence(schedule: str, steps: int) -> None:
    """A warm-up of a quarter, a plateau to three quarters, and a decay to a tenth."""

    def in_sequence(opt: SGD, total: int) -> LRScheduler:
        rise, plateau, fall = total // 4, total // 2, total - 3 * total // 4
        parts: list[LRScheduler] = [LinearLR(opt, 1 / rise, total_iters=rise - 1), ConstantLR(opt, 1.0)]
        linear = schedule == "linear"
        parts += [LinearLR(opt, 1.0, 0.1, fall) if linear else CosineAnnealingLR(opt, fall, eta_min=0.1)]
        return SequentialLR(opt, parts, [rise, rise + plateau])

    config = {"schedule": schedule, "warmup": 0.25, "decay_start": 0.75, "floor": 0.1}
    assert factors(config, steps) == pytest.approx(lrs(in_sequence, T * steps), abs=1e-12)


@pytest.mark.parametrize(("schedule", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("wsd", "1-sqrt")])
@pytest.mark.parametrize(("start", "floor"), [(0.5, 0.0), (0.75, 0.2), (0.0, 0.5)])
def test_decays_are_those_of_transformers(schedule: str, theirs: str, start: float, floor: float) -> None:
    optimization = pytest.importorskip("transformers.optimization")

    def warmup_stable_decay(opt: SGD, total: int) -> LRScheduler:
        found: LRScheduler = optimization.get_wsd_schedule(
            opt, 0, round((1 - start) * total), total, decay_type=theirs, min_lr_ratio=floor
        )
        return found

    config = {"schedule": schedule, "decay_start": start, "floor": floor}
    assert factors(config, 4) == pytest.approx(lrs(warmup_stable_decay, 4 * T), abs=1e-12)


def test_wsd_decays_over_the_last_fifth_by_default() -> None:
    found = factors({"schedule": "wsd"}, 5)
    assert found[:49] == [1.0] * 49
    assert found[49:] == pytest.approx([1 - ((step - 48) / 12) ** 0.5 for step in range(49, 60)])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_decay_that_begins_at_the_end_is_none(schedule: str) -> None:
    assert factors({"schedule": schedule, "decay_start": 1.0, "floor": 0.5}, 3) == [1.0] * 3 * T
    assert lr_factor({"schedule": schedule, "decay_start": 1.0}, T + 1, T) == 1
    assert lr_factor({"schedule": schedule, "floor": 0.5}, T + 1, T) == 0.5


@pytest.mark.parametrize(
    "config",
    [
        {"schedule": "wsd", "warmup": 0.1, "decay_start": 0.6, "floor": 0.05},
        {"schedule": "step", "step_size": 5, "warmup_epochs": 1.5},
        {"schedule": lambda step, steps: 1 - step / steps},
    ],
)
def test_torchs_own_scheduler_of_a_schedule(config: dict[str, Any]) -> None:
    def ours(opt: SGD, total: int) -> LRScheduler:
        return as_lambda_lr(opt, config, T, total // T)

    assert lrs(ours, 7 * T) == pytest.approx(factors(config, 7), abs=1e-12)
    with pytest.raises(ValueError, match="`floor` is 2, but must be a share of the highest learning rate"):
        as_lambda_lr(SGD([torch.zeros(1)], lr=1.0), {"schedule": "linear", "floor": 2}, T)


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
        ({"schedule": lambda step, steps: 10**400}, 0, r"`schedule\(step, steps\)` is 10+.* a finite number"),
        ({"schedule": "step", "step_size": 0}, 0, "`step_size` is 0, but must be a number of epochs >= 1"),
        ({"schedule": "exponential", "gamma": 0.0}, 0, r"`gamma` is 0.0, but must be in \(0, 1\]"),
        ({"warmup_epochs": -1}, 0, "`warmup_epochs` is -1, but must be a finite number of epochs >= 0"),
        ({"warmup": 1.0}, 0, r"`warmup` is 1.0, but must be a share of the training, in \[0, 1\)"),
        ({"schedule": "linear", "decay_start": -0.1}, 0, r"`decay_start` is -0.1, but must be a share of the training"),
        ({"schedule": "wsd", "floor": 1.1}, 0, "`floor` is 1.1, but must be a share of the highest learning rate"),
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
    assert lr_factor({"floor": "oak", "decay_start": None}, 0, T) == 1
