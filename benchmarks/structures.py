"""64 configurations over 12 structures: each width in groups of its own, and the narrower widths padded.

    python -m benchmarks.structures [--seeds 5] [--out FOLDER]

Both train the same configurations of MLPs on digits (depth x width x activation, learning rate, optimizer), in turns.
Compared are the sweep's wall time, the CPU time of the whole call, the fused groups, and the score of the model handed
back. It rewrites `structures.{json,md}`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.rasda_report import RESULTS, cpu_model
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

Row = dict[str, Any]


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
    where, rows = result["environment"], result["rows"]
    ratio = median(ratios(rows))
    lines = [
        "# Structures",
        "",
        f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, {where['date']}, load {where['load']}. "
        f"Rerun: `{where['command']}`. 64 configurations over 12 structures. Without padding, the sweep takes "
        f"{ratio:.2f} times as long as with it (median of pairs; the target was 1.5).",
        "",
        "| seed | widths | sweep, s | CPU time of the call, s | epochs | fused groups | val_loss handed back |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [f"{row[name]:.1f}" for name in ("sweep_seconds", "cpu_seconds")]
        cells = [row["seed"], "padded" if row["padded"] else "apart", *times, row["epochs"], row["groups"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['best']:.4f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in turns and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-t", type=int, default=27)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    load, rows = round(os.getloadavg()[0], 1), []
    measure(True, 99, 8, 2)  # what a first search alone has to do
    for seed in range(asked.seeds):
        for padded in (False, True):
            rows.append(measure(padded, seed, asked.samples, asked.max_t))
            print(rows[-1], flush=True)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    where = {"cpu": cpu_model(), "cores": os.cpu_count(), "torch": torch.__version__, "date": day, "load": load}
    result = {"environment": where | {"command": "python -m benchmarks.structures"}, "rows": rows}
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / FILE).write_text(json.dumps(result, indent=1) + "\n")
    (asked.out / FILE).with_suffix(".md").write_text(markdown(result))


if __name__ == "__main__":
    main()
