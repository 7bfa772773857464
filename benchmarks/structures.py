"""64 configurations over 12 structures: one after another, in groups of one width each, and with widths padded.

    python -m benchmarks.structures [--seeds 5] [--out FOLDER]

All train the same configurations of MLPs on digits (depth x width x activation, learning rate, optimizer), in turns.
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
from hydro_rasda import RaceConfig, SweepConfig, choice, loguniform, tune
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
ALONE, APART, PADDED = WAYS = "one after another", "a group for each width", "padded"


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """An MLP of 8x8 images."""
    width, activation = int(config["width"] * width_ratio), ACTIVATIONS[config["activation"]]
    hidden = [layer for _ in range(config["depth"]) for layer in (nn.Linear(width, width), activation())]
    return nn.Sequential(nn.Linear(64, width), activation(), *hidden, nn.Linear(width, 10))


def measure(way: str, seed: int, samples: int, max_t: int) -> Row:
    """One search."""
    task, before = digits(Path()), os.times()
    apart = patch.object(dispatch, "find_wider", lambda *asked: Unit({})) if way == APART else contextlib.nullcontext()
    with apart, tempfile.TemporaryDirectory() as folder:
        result = tune(
            model_fn,
            SPACE,
            train_data=task.train,
            val_data=task.val,
            num_samples=samples,
            max_t=max_t,
            sweep=SweepConfig(fusion=1) if way == ALONE else SweepConfig(),
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
    row = {"way": way, "seed": seed, "sweep_seconds": cost.surrogate_seconds, "cpu_seconds": used}
    return row | {"epochs": cost.surrogate_epochs, "groups": len(groups), "best": result.best_metric}


def ratios(rows: Sequence[Row], way: str) -> list[float]:
    """Return how many times as long the sweep takes in one way as with padding, for each seed."""
    padded = {row["seed"]: row["sweep_seconds"] for row in rows if row["way"] == PADDED}
    return [row["sweep_seconds"] / padded[row["seed"]] for row in rows if row["way"] == way]


def markdown(result: Row) -> str:
    """A line for each search, and the medians."""
    where, rows = result["environment"], []
    alone, apart = (median(ratios(result["rows"], way)) for way in (ALONE, APART))
    for row in result["rows"]:
        times = [f"{row[name]:.1f}" for name in ("sweep_seconds", "cpu_seconds")]
        cells = [row["seed"], row["way"], *times, str(row["epochs"]), row["groups"]]
        rows.append([*cells, f"{row['best']:.4f}"])
    times = ["sweep, s", "CPU time of the call, s"]
    return f"""# Structures

{where["cpu"]}, {where["cores"]} cores, torch {where["torch"]}, {where["date"]}, load {where["load"]}. \
Rerun: `{where["command"]}`. 64 configurations over 12 structures. In groups of one width each, the sweep \
takes {apart:.2f} times as long as with widths padded (median over seeds; the target was 1.5). One after another, it \
takes {alone:.2f} times as long.

{columns(["seed", "trained", *times, "epochs", "fused groups", "val_loss handed back"], rows)}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in turns and write the files."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-t", type=int, default=27)
    asked = parser.parse_args(arguments)
    where, rows = environment("torch", command="python -m benchmarks.structures"), []
    measure(PADDED, 99, 8, 2)  # what a first search alone has to do
    for seed in range(asked.seeds):
        for way in WAYS:
            rows.append(measure(way, seed, asked.samples, asked.max_t))
            print(rows[-1], flush=True)
    result = {"environment": where, "rows": rows}
    save(asked.out / FILE, result, markdown(result))


if __name__ == "__main__":
    main()
