"""The schedules of `transformers`, each as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import get_scheduler


@dataclass(frozen=True)
class TrainerSchedule:
    """The factor of the learning rate in `Trainer`: `schedule(step, steps)`, from step 0.

    Attributes:
        kind: `lr_scheduler_type`.
        warmup: `warmup_steps`; below 1, the share of all steps.
        lr: The learning rate, which some need.
        options: `lr_scheduler_kwargs`, as pairs.
    """

    kind: str
    warmup: float
    lr: float
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, step: int, steps: int) -> float:
        warmup = int(self.warmup) if self.warmup >= 1 else math.ceil(steps * self.warmup)
        return float(_factor(self.kind, warmup, steps, self.lr, self.options)(step))


@lru_cache(maxsize=1024)
def _factor(
    kind: str, warmup: int, steps: int, lr: float, options: tuple[tuple[str, Any], ...]
) -> Callable[[int], float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    made = get_scheduler(kind, optimizer, warmup, steps, scheduler_specific_kwargs=dict(options) or None)
    factor: Callable[[int], float] = made.lr_lambdas[0]
    return factor
