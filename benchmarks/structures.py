"""64 configurations over 12 structures: each width in groups of its own, and the narrower widths padded.

    python -m benchmarks.structures [--seeds 5] [--out FOLDER]

Both train the same configurations of MLPs on digits (depth x width x activation, learning rate, optimizer), in turns.
Compared are the sweep's wall time, the CPU time of the whole call, the fused groups, and the score of the model handed
back. It rewrites `structures.{json,md}`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from torch import nn

from benchmarks.result_files import Row, columns, environment, options, save
from benchmarks.transfer_tasks import digits
from hydro_rasda import RaceConfig, choice, loguniform, tune
from hydro_rasda.run.journal import Unit
from hydro_rasda.run.store import Store
from hydro_rasda.stages import dispatch

FILE = "structures.json"
SPACE: dict[str, Any] = {
    "lr": loguniform(1e-4, 1),
    "optimizer": choice(["sgd", "adamw"]),
    "depth": choice([1, 2, 3]),
    "width": choice([128, 256]),
    "activation": choice(["relu", "tanh"]),
    "batch_size": 32,
}
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """An MLP of 8x8 images."""
    width, activation = int(config["width"] * width_ratio), ACTIVATIONS[config["activation"]]
    hidden = [layer for _ in range(config["depth"]) for layer in (nn.Linear(width, width), activation())]
    return nn.Sequential(nn.Linear(64, width), activation(), *hidden, nn.Linear(width, 10))


def measure(padded: bool, seed: int, samples: int, max_t: int) -> Row:
    """One search."""
    task, before = digits(Path()), os.times()
    alone = contextlib.nullcontext() if padded else patch.object(dispatch, "find_wider", lambda *asked: Unit({}))
    with alone, tempfile.TemporaryDirectory() as folder:
        result = tune(
            model_fn,
            SPACE,
            train_data=task.train,
            val_data=task.val,
            num_samples=samples,
            max_t=max_t,
            race=RaceConfig(top_k=2),
            full_trainings=1,
            storage_path=folder,
            name="run",
            seed=seed,
            progress=False,
        )
        groups = [
            len(group)
            for key, unit in Store.read(result.path).units().items()
            if "/group-" in key
            for group in unit.value["groups"]
        ]
    cost, used = result.cost, sum(os.times()[:4]) - sum(before[:4])
    row = {"padded": padded, "seed": seed, "sweep_seconds": cost.surrogate_seconds, "cpu_seconds": used}
    return row | {"epochs": cost.surrogate_epochs, "groups": len(groups), "best": result.best_metric}


def ratios(rows: Sequence[Row]) -> list[float]:
    """Return how many times as long the sweep takes without padding as with it, in each pair."""
    return [a["sweep_seconds"] / b["sweep_seconds"] for a, b in zip(rows[::2], rows[1::2], strict=True)]


def markdown(result: Row) -> str:
    """A line for each search, and the medians."""
    where, ratio, rows = result["environment"], median(ratios(result["rows"])), []
    for row in result["rows"]:
        times = [f"{row[name]:.1f}" for name in ("sweep_seconds", "cpu_seconds")]
        cells = [row["seed"], "padded" if row["padded"] else "apart", *times, str(row["epochs"]), row["groups"]]
        rows.append([*cells, f"{row['best']:.4f}"])
    times = ["sweep, s", "CPU time of the call, s"]
    return f"""# Structures

{where["cpu"]}, {where["cores"]} cores, torch {where["torch"]}, {where["date"]}, load {where["load"]}. \
Rerun: `{where["command"]}`. 64 configurations over 12 structures. Without padding, the sweep takes \
{ratio:.2f} times as long as with it (median of pairs; the target was 1.5).

{columns(["seed", "widths", *times, "epochs", "fused groups", "val_loss handed back"], rows)}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in turns and write the files."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-t", type=int, default=27)
    asked = parser.parse_args(arguments)
    where, rows = environment("torch", command="python -m benchmarks.structures"), []
    measure(True, 99, 8, 2)  # what a first search alone has to do
    for seed in range(asked.seeds):
        for padded in (False, True):
            rows.append(measure(padded, seed, asked.samples, asked.max_t))
            print(rows[-1], flush=True)
    result = {"environment": where, "rows": rows}
    save(asked.out / FILE, result, markdown(result))


if __name__ == "__main__":
    main()
