"""Parts that the compared searches share: configurations, seeds and results."""

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
        full_size: True if the full-size model trained, False if a surrogate did.
        epoch: Epochs trained, from 1. At full size, a finalist starts again from 1.
        score: Score on the validation set; NaN if the trial diverged.
        test: Score on the test set.
    """

    seconds: float
    trial: int
    full_size: bool
    epoch: int
    score: float
    test: float


@dataclass
class Searched:
    """Result of a search.

    Attributes:
        wall: Seconds from the call to the trained model, without the imports of processes.
        apart: Name of a part of `wall` -> its seconds.
        keep: "last" if the model has the weights of its last epoch, "best" if it has those of its best epoch.
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
    """Return the configurations that `tune` samples for this seed."""
    return sample(task.space(), task.num_samples, seed)


def seeds(task: Task, trial: int, seed: int) -> Seeds:
    """Return the seeds that `tune` derives for a full-size trial."""
    shuffles = [derive_seed(seed, "shuffle", epoch) for epoch in range(task.max_t)]
    return Seeds(derive_seed(seed, "weights", trial), shuffles)


def best_finished(task: Task, events: Sequence[Event]) -> int:
    """Return the best of the trials that trained to the end. The others have no checkpoint."""
    done = [e for e in events if e.epoch == task.max_t and math.isfinite(e.score)]
    if not done:
        raise RuntimeError(f"no trial of {task.name} trained for {task.max_t} epochs with a finite score")
    sign = 1 if task.mode == "max" else -1
    return max(done, key=lambda e: (sign * e.score, -e.trial)).trial
