"""Learning-rate schedules as one pure function of the epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fusion.checks import check_int, check_mapping, is_number, require
from fusion.hyperparameters import SCHEDULES, read

__all__ = ["SCHEDULES", "lr_factor"]


def lr_factor(config: Mapping[str, Any], epoch: float, max_epochs: int, steps_per_epoch: float = 1) -> float:
    """What to multiply the learning rate with in the step that begins at a point of training.

    With e = floor(epoch), T = max_epochs and w = warmup_epochs, the factor is decay(e) * warm-up(epoch):

    | `schedule` | decay(e) | as in torch, stepped once an epoch |
    |---|---|---|
    | constant | 1 | |
    | cosine | (1 + cos(pi e / T)) / 2 | CosineAnnealingLR(T_max=T) |
    | step | gamma ** (e // step_size) | StepLR |
    | exponential | gamma ** e | ExponentialLR |
    | linear | 1 - s / S, step by step | LinearLR(1, 0, total_iters=S), stepped once a step |
    | one_cycle | up to 1 in 0.3 of all steps, then down, step by step | OneCycleLR(total_steps=S), likewise |
    | a function f(step, steps) | f(s, S), step by step | LambdaLR, likewise |

    s is the step that begins, from 0, and S the number of all steps. With one_cycle, `lr` is the highest rate; momentum
    stays as it is.

    The warm-up rises in a line, step by step: step i of the n = w * steps_per_epoch that it lasts has the factor
    (i + 1) / n, as LinearLR(start_factor=1 / n, total_iters=n - 1) has; a first step at 0 would be lost. From T on,
    cosine stays at 0.

    Args:
        config: The keys `schedule`, `gamma`, `step_size`, `warmup_epochs`, with the defaults of
            `fusion.hyperparameters`; others are ignored.
        epoch: Epochs done before the step, >= 0; 2.5 is the middle of the third.
        max_epochs: Epochs in all, >= 1.
        steps_per_epoch: How often an epoch the factor is set, >= 1.

    Raises:
        ValueError: for an unknown schedule or a value out of range, such as what a function returns.

    >>> [lr_factor({"schedule": "cosine"}, epoch, 4) for epoch in (0, 2.5, 4)]
    [1.0, 0.5, 0.0]
    >>> lr_factor({"schedule": "step", "gamma": 0.5, "step_size": 2}, 5, 10)
    0.25
    >>> [lr_factor({"warmup_epochs": 2}, step / 2, 10, steps_per_epoch=2) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    >>> [lr_factor({"schedule": lambda step, steps: 1 - step / steps}, step / 2, 2, 2) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    check_mapping("config", config)
    require(is_number(epoch) and epoch >= 0, "epoch", epoch, "a finite number >= 0")
    check_int("max_epochs", max_epochs, at_least=1)
    require(is_number(steps_per_epoch) and steps_per_epoch >= 1, "steps_per_epoch", steps_per_epoch, ">= 1")
    warmup = read(config, "warmup_epochs")
    rise = min(1.0, (epoch + 1 / steps_per_epoch) / warmup) if warmup > 0 else 1.0
    schedule = read(config, "schedule")
    if schedule in _DECAYS:
        return rise * _DECAYS[schedule](config, math.floor(epoch), max_epochs)
    factor = _BY_STEP.get(schedule, schedule)(round(epoch * steps_per_epoch), round(max_epochs * steps_per_epoch))
    require(is_number(factor) and factor >= 0, "schedule(step, steps)", factor, "a finite number >= 0")
    return rise * float(factor)


def _constant(config: Mapping[str, Any], epoch: int, max_epochs: int) -> float:
    return 1.0


def _cosine(config: Mapping[str, Any], epoch: int, max_epochs: int) -> float:
    return (1.0 + math.cos(math.pi * min(epoch, max_epochs) / max_epochs)) / 2.0


def _step(config: Mapping[str, Any], epoch: int, max_epochs: int) -> float:
    gamma: float = read(config, "gamma")
    factor: float = gamma ** (epoch // read(config, "step_size"))
    return factor


def _exponential(config: Mapping[str, Any], epoch: int, max_epochs: int) -> float:
    gamma: float = read(config, "gamma")
    return gamma**epoch


def _linear(step: int, steps: int) -> float:
    return max(0.0, 1 - step / steps)


def _one_cycle(step: int, steps: int) -> float:
    """Smith and Topin 2018, with torch's shape and defaults: from 1/25 to 1, and down to 1/25e4 in the last step."""
    top, low, end = 0.3 * steps - 1, 1 / 25, 1 / 25e4
    if step <= top:
        return _annealed(low, 1.0, step / top)
    return _annealed(1.0, end, min(1.0, (step - top) / (steps - 1 - top)))


def _annealed(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


_DECAYS: dict[str, Callable[[Mapping[str, Any], int, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "step": _step,
    "exponential": _exponential,
}
_BY_STEP: dict[Any, Callable[[int, int], float]] = {"linear": _linear, "one_cycle": _one_cycle}
