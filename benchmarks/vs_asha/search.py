"""What the compared searches have in common: what they try, and what they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from benchmarks.tasks.task import Config, Task
from benchmarks.vs_asha.training import Seeds
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.settings.config import Keep, TuneConfig
from hydro_rasda.space.space import sample

GRACE_PERIOD = 1
REDUCTION_FACTOR = 3


class Event(NamedTuple):
    """A trial's scores after an epoch.

    Attributes:
        full_size: Whether it was the full-size model that trained, not a surrogate.
        epoch: Epochs trained, from 1; a finalist starts at full size anew.
        score: On the validation set; NaN where it diverged.
    """

    seconds: float
    trial: int
    full_size: bool
    epoch: int
    score: float
    test: float


@dataclass
class Searched:
    """What a search gave.

    Attributes:
        wall: Seconds from the call to the trained model in hand, without the processes' imports.
        apart: Parts of `wall` that are worth knowing, in seconds.
        keep: Whether that model has its last epoch's weights, or its best one's.
        full_trainings: The argument of `tune`; its default for other searches.
    """

    wall: float
    events: list[Event]
    winner: int
    model: nn.Module
    apart: dict[str, float] = field(default_factory=dict)
    keep: Keep = "last"
    full_trainings: float = TuneConfig.full_trainings


def configurations(task: Task, seed: int) -> list[Config]:
    """The configurations that `tune` samples for this seed."""
    return sample(task.space(), task.num_samples, seed)


def seeds(task: Task, trial: int, seed: int) -> Seeds:
    """The seeds that `tune` derives for a full-size trial."""
    shuffles = [derive_seed(seed, "shuffle", epoch) for epoch in range(task.max_t)]
    return Seeds(derive_seed(seed, "weights", trial), shuffles)


def best_finished(task: Task, events: Sequence[Event]) -> int:
    """The best of the trials that trained to the end: the others have no checkpoint."""
    done = [e for e in events if e.epoch == task.max_t and math.isfinite(e.score)]
    if not done:
        raise RuntimeError(f"no trial of {task.name} trained for {task.max_t} epochs with a finite score")
    sign = 1 if task.mode == "max" else -1
    return max(done, key=lambda e: (sign * e.score, -e.trial)).trial
