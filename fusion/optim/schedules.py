"""All learning rate schedules as one pure function of the configuration and the epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fusion.argument_checks import check_int, check_mapping, is_number, require
from fusion.keys import check, read, warmup_epochs


def lr_factor(config: Mapping[str, Any], epoch: float, max_epochs: int, steps_per_epoch: float = 1) -> float:
    """Return the schedule's factor of the learning rate, for the step that begins after `epoch` epochs.

    Let s be the index of this step, from 0, and S the number of all steps. The factor is the decay times the warm-up:

    | `schedule` | decay | as in torch |
    |---|---|---|
    | constant | 1 | |
    | linear | 1 - x | LinearLR(1, floor, total_iters), after the steps before `decay_start` |
    | cosine | (1 + cos(pi x)) / 2 | CosineAnnealingLR(T_max, eta_min), after the steps before `decay_start` |
    | wsd | 1 - sqrt(x) | `get_wsd_schedule(decay_type="1-sqrt")` of `transformers` |
    | one_cycle | up to 1 in 0.3 of all steps, then down | OneCycleLR(total_steps=S) |
    | a function f(step, steps) | f(s, S) | LambdaLR |
    | step | gamma ** (floor(epoch) // step_size) | StepLR, stepped once an epoch |
    | exponential | gamma ** floor(epoch) | ExponentialLR, stepped once an epoch |

    x is the progress of the decay: 0 for the first `decay_start` S steps, then (s - decay_start S) / (S - decay_start
    S). Schedules with x end at `floor`: if d is the entry of the table, their decay is floor + (1 - floor) d. The
    1-sqrt cooldown of "wsd" is that of Hägele et al. 2024 (arXiv:2405.18392), by default over the last fifth of the
    training. With one_cycle, `lr` is the highest learning rate, and the momentum does not change.

    The warm-up is linear. It lasts for the share `warmup` of the training, or for `warmup_epochs`. Step i of n (from 0)
    has the factor (i + 1) / n, as in LinearLR(start_factor=1 / n, total_iters=n - 1). A factor of 0 would waste a step.

    Args:
        config: The keys `schedule`, `decay_start`, `floor`, `gamma`, `step_size`, `warmup` and `warmup_epochs`, with
            the defaults of `fusion.keys`; others are ignored.
        epoch: Epochs before the step, >= 0; 2.5 is the middle of the third epoch.
        max_epochs: Number of epochs of the training, >= 1.
        steps_per_epoch: Number of times that the factor is set in an epoch, >= 1.

    Raises:
        ValueError: for an unknown schedule, or a value out of range, such as a negative result of a function.

    >>> [lr_factor({"schedule": "cosine"}, epoch, 4) for epoch in (0, 2, 4)]
    [1.0, 0.5, 0.0]
    >>> [lr_factor({"schedule": "linear", "decay_start": 0.5, "floor": 0.5}, epoch, 4) for epoch in range(5)]
    [1.0, 1.0, 1.0, 0.75, 0.5]
    >>> lr_factor({"schedule": "step", "gamma": 0.5, "step_size": 2}, 5, 10)
    0.25
    >>> [lr_factor({"warmup": 0.2}, step / 2, 10, steps_per_epoch=2) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    >>> [lr_factor({"schedule": lambda step, steps: 1 - step / steps}, step / 2, 2, 2) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    check_mapping("config", config)
    require(is_number(epoch) and epoch >= 0, "epoch", epoch, "a finite number >= 0")
    check_int("max_epochs", max_epochs, at_least=1)
    require(is_number(steps_per_epoch) and steps_per_epoch >= 1, "steps_per_epoch", steps_per_epoch, ">= 1")
    warmup = warmup_epochs(config, max_epochs)
    rise = min(1.0, (epoch + 1 / steps_per_epoch) / warmup) if warmup > 0 else 1.0
    schedule = read(config, "schedule")
    if schedule in _BY_EPOCH:
        return rise * _BY_EPOCH[schedule](config, math.floor(epoch))
    step, steps = round(epoch * steps_per_epoch), round(max_epochs * steps_per_epoch)
    if schedule in _SHAPES:
        return rise * _decayed(config, step, steps)
    factor = _one_cycle(step, steps) if schedule == "one_cycle" else schedule(step, steps)
    require(is_number(factor) and factor >= 0, "schedule(step, steps)", factor, "a finite number >= 0")
    return rise * float(factor)


def as_lambda_lr(
    optimizer: Optimizer, config: Mapping[str, Any], max_epochs: int, steps_per_epoch: int = 1
) -> LambdaLR:
    """Make a torch scheduler for the schedule of `config`. Call its `step()` after each step of the optimizer.

    Args:
        optimizer: Its learning rates are those for a factor of 1.
        config: See `lr_factor`.
        max_epochs: See `lr_factor`.
        steps_per_epoch: Optimizer steps in an epoch, >= 1.

    Raises:
        ValueError: if the configuration breaks a rule.

    >>> from torch import optim, zeros
    >>> opt = optim.SGD([zeros(1)], lr=0.1)
    >>> scheduler = as_lambda_lr(opt, {"schedule": "linear", "decay_start": 0.5}, max_epochs=2, steps_per_epoch=2)
    >>> for _ in range(4):
    ...     print(opt.param_groups[0]["lr"])
    ...     opt.step()
    ...     scheduler.step()
    0.1
    0.1
    0.1
    0.05
    """
    check_mapping("config", config)
    check_int("steps_per_epoch", steps_per_epoch, at_least=1)
    check(config)
    return LambdaLR(optimizer, partial(_at_step, dict(config), max_epochs, steps_per_epoch))


def _at_step(config: Mapping[str, Any], max_epochs: int, steps_per_epoch: int, step: int) -> float:
    return lr_factor(config, step / steps_per_epoch, max_epochs, steps_per_epoch)


def _decayed(config: Mapping[str, Any], step: int, steps: int) -> float:
    floor: float = read(config, "floor")
    start, step = read(config, "decay_start") * steps, min(step, steps)
    if step <= start:
        return 1.0
    return floor + (1 - floor) * _SHAPES[read(config, "schedule")]((step - start) / (steps - start))


def _one_cycle(step: int, steps: int) -> float:
    """Return the factor of Smith and Topin 2018 as torch has it: from 1/25 up to 1, then to 1/25e4 in the last step."""
    top, low, end = 0.3 * steps - 1, 1 / 25, 1 / 25e4
    if step <= top:
        return _annealed(low, 1.0, step / top)
    return _annealed(1.0, end, min(1.0, (step - top) / (steps - 1 - top)))


def _annealed(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


_BY_EPOCH: dict[Any, Callable[[Mapping[str, Any], int], float]] = {
    "constant": lambda config, epoch: 1.0,
    "step": lambda config, epoch: read(config, "gamma") ** (epoch // read(config, "step_size")),
    "exponential": lambda config, epoch: read(config, "gamma") ** epoch,
}
_SHAPES: dict[Any, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "wsd": lambda x: 1 - math.sqrt(x),
}
