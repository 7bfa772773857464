"""Learning-rate schedules as one pure function of the epoch."""

import math
from collections.abc import Callable, Mapping
from typing import Any


def lr_factor(config: Mapping[str, Any], epoch: float, max_epochs: int) -> float:
    """What to multiply the learning rate with at a point of training.

    With e = floor(epoch), T = max_epochs and w = warmup_epochs, the factor is decay(e) * warm-up(epoch):

    | `schedule` | decay(e) | as in torch, stepped once an epoch |
    |---|---|---|
    | constant (default) | 1 | |
    | cosine | (1 + cos(pi e / T)) / 2 | CosineAnnealingLR(T_max=T) |
    | step | gamma ** (e // step_size) | StepLR |
    | exponential | gamma ** e | ExponentialLR |

    The warm-up rises in a line within the epochs: min(1, epoch / w), so it starts at 0 and is done at epoch
    w, and 1 where w is 0. From T on, cosine stays at 0.

    Args:
        config: the keys `schedule`, `gamma` (default 0.1 for step, 0.9 for exponential), `step_size` (epochs,
            default 30), `warmup_epochs` (default 0; fractions are fine); others are ignored.
        epoch: epochs done so far, >= 0; 2.5 is the middle of the third.
        max_epochs: epochs in all, >= 1.

    Raises:
        ValueError: for an unknown schedule or a value out of range.

    >>> [lr_factor({"schedule": "cosine"}, epoch, 4) for epoch in (0, 2.5, 4)]
    [1.0, 0.5, 0.0]
    >>> lr_factor({"schedule": "step", "gamma": 0.5, "step_size": 2}, 5, 10)
    0.25
    >>> lr_factor({"warmup_epochs": 2}, 0.5, 10)
    0.25
    """
    schedule = config.get("schedule", "constant")
    if schedule not in _DECAYS:
        raise ValueError(f"schedule is {schedule!r}, but must be one of {', '.join(_DECAYS)}")
    if not epoch >= 0 or max_epochs < 1:
        raise ValueError(f"epoch is {epoch} and max_epochs {max_epochs}, but they must be >= 0 and >= 1")
    warmup = float(config.get("warmup_epochs", 0.0))
    if not warmup >= 0:
        raise ValueError(f"warmup_epochs is {warmup}, but must be >= 0")
    rise = min(1.0, epoch / warmup) if warmup > 0 else 1.0
    return rise * _DECAYS[schedule](config, math.floor(epoch), max_epochs)


def _constant(config: Mapping[str, Any], epoch: int, max_epochs: int) -> float:
    return 1.0


def _cosine(config: Mapping[str, Any], epoch: int, max_epochs: int) -> float:
    return (1.0 + math.cos(math.pi * min(epoch, max_epochs) / max_epochs)) / 2.0


def _step(config: Mapping[str, Any], epoch: int, max_epochs: int) -> float:
    step_size = int(config.get("step_size", 30))
    if step_size < 1:
        raise ValueError(f"step_size is {step_size}, but must be >= 1")
    return _gamma(config, 0.1) ** (epoch // step_size)


def _exponential(config: Mapping[str, Any], epoch: int, max_epochs: int) -> float:
    return _gamma(config, 0.9) ** epoch


def _gamma(config: Mapping[str, Any], default: float) -> float:
    gamma = float(config.get("gamma", default))
    if not gamma > 0:
        raise ValueError(f"gamma is {gamma}, but must be > 0")
    return gamma


_DECAYS: dict[str, Callable[[Mapping[str, Any], int, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "step": _step,
    "exponential": _exponential,
}

SCHEDULES = tuple(_DECAYS)
