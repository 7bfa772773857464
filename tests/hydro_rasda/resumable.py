"""A run in a process of its own, to be killed: `python -m tests.hydro_rasda.resumable STORAGE NAME [DEVICES [UNITS]]`.

With a number of devices, on a Ray cluster of so many CPU slots. Once its journal has so many units, it waits to be
killed: a signal comes late where the machine is busy.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from hydro_rasda import RaceConfig, RayBackend, SweepConfig, choice, loguniform, tune, uniform
from hydro_rasda.contracts import Event
from tests.hydro_rasda.models import mlp

SPACE: dict[str, Any] = {
    "lr": loguniform(1e-3, 0.3),
    "momentum": uniform(0.5, 0.95),
    "optimizer": choice(["sgd", "adamw"]),
    "activation": choice(["relu", "tanh"]),
    "dropout": uniform(0.0, 0.3),
    "batch_size": 64,
}


def main(storage_path: str, name: str, devices: str = "0", units: str = "1000") -> None:
    journal = Path(storage_path, name, "journal.jsonl")

    def wait(event: Event) -> None:
        if journal.exists() and journal.read_bytes().count(b'"event": "unit"') >= int(units):
            time.sleep(600)

    on_ray: dict[str, Any] = {}
    if int(devices):
        import ray  # not needed by a run without it, which starts sooner so

        ray.init(address="local", num_cpus=int(devices), include_dashboard=False, log_to_driver=False)
        on_ray = {"backend": RayBackend(resources_per_worker={"CPU": 1})}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(480, 64, generator=generator)
    y = (x @ torch.randn(64, 10, generator=generator)).argmax(dim=1)
    result = tune(
        mlp,
        SPACE,
        train_data=(x[:320], y[:320]),
        val_data=(x[320:], y[320:]),
        num_samples=12,
        max_t=6,
        sweep=SweepConfig(reduction_factor=2, surrogate=1 / 2, fusion=4),
        race=RaceConfig(top_k=3, checkpoint_every=1, grace_period=2),
        storage_path=storage_path,
        name=name,
        callbacks=[wait],
        **on_ray,
    )
    print("best", result.best_metric, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
