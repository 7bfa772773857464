"""Small trainings that cannot be fused, really run: packed on the cores of this machine, and one at a time.

    python -m benchmarks.packing run [--quick]

A training by itself: `python -m benchmarks.packing_live ARCHITECTURE LR BATCH EPOCHS`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hydro_rasda.packing import Device, PackResult, Task, cpu, pack
from hydro_rasda.schedulers import Policy, one_a_device

ARCHITECTURES = ("mlp", "deep", "conv", "lstm", "gru", "transformer")
SETTINGS = tuple((lr, batch) for lr in (0.001, 0.003, 0.01, 0.03) for batch in (32, 64))
MEMORY = 2e9
"""Bytes for all jobs that run at the same time: four such trainings."""

Row = dict[str, Any]


def train(architecture: str, lr: float, batch: int, epochs: int) -> float:
    """Train a classifier of scikit-learn's digits; its accuracy on those that it did not see."""
    import torch
    from sklearn.datasets import load_digits
    from torch import Tensor, nn

    class Recurrent(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer, self.out = layer, nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.layer(x.unflatten(1, (8, 8)))[0][:, -1])
            return out

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Linear(8, 32), nn.Linear(32, 10)
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.layer(self.embed(x.unflatten(1, (8, 8)))).mean(1))
            return out

    torch.manual_seed(0)
    made = {
        "mlp": lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        "deep": lambda: nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(64, 64), nn.ReLU())]),
        "conv": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10)
        ),
        "lstm": lambda: Recurrent(nn.LSTM(8, 32, batch_first=True)),
        "gru": lambda: Recurrent(nn.GRU(8, 32, batch_first=True)),
        "transformer": Attending,
    }
    model: nn.Module = made[architecture]()
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        for rows in torch.randperm(1500).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return float((model(x[1500:]).argmax(1) == y[1500:]).float().mean())


def run(quick: bool) -> list[Row]:
    """All trainings, packed and one at a time, in pairs; which of a pair is first alternates."""
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


if __name__ == "__main__":
    name, rate, size, epochs = sys.argv[1:]
    print(train(name, float(rate), int(size), int(epochs)))
