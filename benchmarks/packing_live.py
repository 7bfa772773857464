"""Run small trainings that cannot be fused, several at a time on a device of this machine, and one at a time.

    python -m benchmarks.packing run tune-local tune-ray [--quick]

Run one training alone by `python -m benchmarks.packing_live ARCHITECTURE LR BATCH EPOCHS`. Run all as one search by
`python -m benchmarks.packing_live tune local|ray several|one QUICK FOLDER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.result_files import Row
from hydro_rasda import SweepConfig
from hydro_rasda.packing import Device, PackResult, Task, cpu, pack
from hydro_rasda.schedulers import Policy, one_a_device

ARCHITECTURES = ("mlp", "deep", "conv", "lstm", "gru", "transformer")
SETTINGS = tuple((lr, batch) for lr in (0.001, 0.003, 0.01, 0.03) for batch in (32, 64))
MEMORY = 2e9
"""Bytes for all jobs that run at the same time: four such trainings."""


def model(architecture: str, width: int = 32) -> Any:
    """Build a classifier of 8 x 8 pixels. Models of different architectures or widths cannot be fused."""
    from torch import Tensor, nn

    class Recurrent(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer, self.out = layer, nn.Linear(width, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.layer(x.unflatten(1, (8, 8)))[0][:, -1])
            return out

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Linear(8, width), nn.Linear(width, 10)
            self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.layer(self.embed(x.unflatten(1, (8, 8)))).mean(1))
            return out

    layers = [64, *[2 * width] * 6]
    made = {
        "mlp": lambda: nn.Sequential(nn.Linear(64, 8 * width), nn.ReLU(), nn.Linear(8 * width, 10)),
        "deep": lambda: nn.Sequential(*[part for sizes in pairwise(layers) for part in (nn.Linear(*sizes), nn.ReLU())]),
        "conv": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36 * width, 10)
        ),
        "lstm": lambda: Recurrent(nn.LSTM(8, width, batch_first=True)),
        "gru": lambda: Recurrent(nn.GRU(8, width, batch_first=True)),
        "transformer": Attending,
    }
    return made[architecture]()


def digits() -> tuple[Any, Any]:
    """Return scikit-learn's digits as pairs `(inputs, target)`: 1,500 to train on, and the others, held back."""
    import torch
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def train(architecture: str, lr: float, batch: int, epochs: int) -> float:
    """Train a classifier of scikit-learn's digits, and return its accuracy on digits that it did not see."""
    import torch

    torch.manual_seed(0)
    made, ((x, y), (held, truth)) = model(architecture), digits()
    optimizer = torch.optim.Adam(made.parameters(), lr=lr)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(made(x[rows]), y[rows]).backward()
            optimizer.step()
    return float((made(held).argmax(1) == truth).float().mean())


def run(quick: bool) -> list[Row]:
    """Run all trainings in pairs, packed and one at a time. Each way is first in every other pair."""
    program, epochs = [sys.executable, "-m", "benchmarks.packing_live"], "1" if quick else "15"
    tasks = [
        Task([*program, architecture, str(lr), str(batch), epochs], kind=architecture)
        for lr, batch in SETTINGS[: 1 if quick else None]
        for architecture in ARCHITECTURES[: 3 if quick else None]
    ]
    device = cpu(memory=MEMORY)
    threads = Device("cpu", MEMORY, device.compute, {**device.environment, "OMP_NUM_THREADS": f"{device.compute:.0f}"})
    ways: dict[str, tuple[Device, Policy | None]] = {"packed": (device, None), "one at a time": (threads, one_a_device)}
    return [_pair(tasks, dict(sorted(ways.items(), reverse=i % 2 == 1)), i) for i in range(1 if quick else 5)]


def _pair(tasks: list[Task], ways: dict[str, tuple[Device, Policy | None]], pair: int) -> Row:
    row: Row = {"pair": pair, "jobs": len(tasks), "cores": next(iter(ways.values()))[0].compute}
    with tempfile.TemporaryDirectory() as folder:
        for way, (device, policy) in ways.items():
            result = pack(tasks, [device], policy=policy, storage_path=Path(folder), name=way.replace(" ", "-"))
            row[way] = _summed_up(result)
    return {**row, "ratio": row["one at a time"]["seconds"] / row["packed"]["seconds"]}


def _summed_up(result: PackResult) -> Row:
    return {
        "seconds": result.seconds,
        "failed": len(result.failed),
        "killed": sum(job.alone for job in result.jobs),
        "started_again": sum(job.attempt - 1 for job in result.jobs),
        "largest_MB": max(job.memory for job in result.jobs) / 1e6,
    }


WIDTHS = (24, 32, 40, 48)
SEVERAL, ONE = "several", "one"
PLACES = ("local", "ray")


def tuned(place: str, quick: bool) -> list[Row]:
    """Tune models of which no two can be fused, in pairs: several at a time on a device, and one at a time."""
    rows = []
    for i in range(1 if quick else 3):
        row: Row = {"pair": i, "place": place}
        for way in sorted((SEVERAL, ONE), reverse=i % 2 == 1):
            row[way] = _of_own(place, way, quick)
        rows.append({**row, "ratio": row[ONE]["seconds"] / row[SEVERAL]["seconds"]})
    return rows


def _of_own(*arguments: object) -> Row:
    """Run `search` in a separate process with an empty cache, and return its measurements."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HYDRO_RASDA_CACHE": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "benchmarks.packing_live", "tune", *map(str, arguments), folder]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def search(place: str, way: str, quick: bool, folder: str) -> Row:
    """Tune on the GPU if there is one, else on all cores as one device. The start of Ray does not count.

    If trials train one at a time, a GPU has one process. A CPU then has one core, because small models do not keep a
    second core busy.
    """
    import ray
    import torch

    from hydro_rasda import LocalBackend, RayBackend, grid_search, loguniform, tune

    gpu = torch.cuda.is_available()
    cores = len(os.sched_getaffinity(0)) if way == SEVERAL or gpu else 1
    torch.set_num_threads(cores)
    backend: Any = "local"
    if place == "ray":
        ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, configure_logging=False)
        part = {"CPU": 1, "GPU": 0.5 if way == SEVERAL else 1} if gpu else {"CPU": cores}
        backend = RayBackend(resources_per_worker=part)
    elif gpu:
        backend = LocalBackend(["cuda:0"] * (2 if way == SEVERAL else 1))
    train_data, val_data = digits()
    began = time.monotonic()
    result = tune(
        lambda config: model(config["architecture"], config["width"]),
        {
            "architecture": grid_search([*ARCHITECTURES[: 3 if quick else None]]),
            "width": grid_search([*WIDTHS[: 1 if quick else None]]),
            "lr": loguniform(1e-3, 1e-2),
            "optimizer": "adam",
            "batch_size": 32,
        },
        train_data=train_data,
        val_data=val_data,
        num_samples=1,
        max_t=3 if quick else 27,
        sweep=SweepConfig(surrogate=1, fusion=1),
        backend=backend,
        storage_path=folder,
        progress=False,
    )
    seconds = time.monotonic() - began
    epochs = result.cost.sweep_epochs + result.cost.race_epochs
    failed = sum(record.status == "failed" for record in result.trials)
    told = {"seconds": seconds, "trials": len(result.trials), "epochs": epochs, "failed": failed}
    return {**told, "device": "GPU" if gpu else "CPU", "best": result.best_trial, "loss": result.best_metric}


if __name__ == "__main__":
    if sys.argv[1] == "tune":
        _, _, where, how, short, into = sys.argv
        print(json.dumps(search(where, how, short == "True", into)))
    else:
        name, rate, size, times = sys.argv[1:]
        print(train(name, float(rate), int(size), int(times)))
