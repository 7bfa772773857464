"""A small problem, and trials of it."""

from __future__ import annotations

from typing import Any

import torch

from hydro_rasda import SweepConfig
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import Data, make_batches
from hydro_rasda.problem.objective import Objective, supervised
from hydro_rasda.problem.problem import Problem
from hydro_rasda.settings.config import TuneConfig
from tests.hydro_rasda.models import Config, mlp

X = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 10
CPU = torch.device("cpu")


def problem(
    model_fn: Any = mlp,
    data: Data = (X, LABELS),
    objective: Objective | None = None,
    metric: str = "val_loss",
    surrogate: float = 0.5,
    seed: int = 0,
) -> Problem:
    return Problem(
        model_fn=model_fn,
        objective=objective or supervised(),
        train_data=make_batches(data, "train_data", CPU, seed),
        val_data=make_batches(data, "val_data", CPU, seed),
        settings=TuneConfig(sweep=SweepConfig(surrogate=surrogate), metric=metric, max_t=4, seed=seed),
        device=CPU,
    )


def trials(*configs: Config) -> list[Trial]:
    return [Trial(number, {"lr": 0.1, "batch_size": 4, **config}) for number, config in enumerate(configs or ({},))]
