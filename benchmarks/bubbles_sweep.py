"""The sweep of `benchmarks.bubbles`: classifiers of digits, two groups of 16 at a time.

    python -m benchmarks.bubbles_sweep SOURCE FOLDER

goes on for ever in the bubbles of the hosts that come to SOURCE, in a process that takes what nobody else needs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import hydro_rasda
import hydro_rasda.bubbles


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """An MLP."""
    width = round(512 * width_ratio)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def tune(folder: Path, name: str, **arguments: Any) -> hydro_rasda.TuneResult:
    """The sweep."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    torch.set_num_threads(2)
    defaults: dict[str, Any] = {
        "space": {
            "lr": hydro_rasda.loguniform(1e-3, 1.0),
            "momentum": hydro_rasda.uniform(0.5, 0.95),
            "optimizer": "sgd",
            "batch_size": 64,
        },
        "train_data": (x[:1200], y[:1200]),
        "val_data": (x[1200:1500], y[1200:1500]),
        "num_samples": 64,
        "max_t": 9,
        "sweep": hydro_rasda.SweepConfig(fusion=16),
        "race": hydro_rasda.RaceConfig(top_k=2),
        "full_trainings": 1,
        "progress": False,
    }
    return hydro_rasda.tune(model_fn, storage_path=folder, name=name, **{**defaults, **arguments})


def main() -> None:
    """Until it is killed, or nearly so."""
    from benchmarks.bubbles_sweep import tune as importable  # guests look for the model by its module's name

    source, folder = map(Path, sys.argv[1:])
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    rungs = hydro_rasda.SweepConfig(grace_period=3000, fusion=16)
    importable(folder, "sweep", max_t=9000, sweep=rungs, backend=hydro_rasda.bubbles.BubbleBackend(source))


if __name__ == "__main__":
    main()
