"""Schedules as hyperparameters, live: a searched decay against the best constant, cosine and linear schedules.

    python -m benchmarks.schedules_live [--tasks shakespeare residual cifar10] [--trials 16] [--data FOLDER]

Each arm is a default `tune` of the same seed, so the same learning rates, with its own schedule in the space. The
winner of each then trains fully with three fresh seeds, by plain torch; its last epoch's test score counts. It measures
quality alone, so load does not matter. It rewrites `schedules_live.{json,md}` in `benchmarks/results` after each arm,
and leaves out the arms that are there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.rasda_report import RESULTS, cpu_model
from benchmarks.tasks.load import load_task
from benchmarks.tasks.task import Task, objective
from benchmarks.transfer_tasks import DEFAULT_DATA
from benchmarks.vs_asha.search import seeds
from benchmarks.vs_asha.training import build, train
from hydro_rasda import tune, uniform

FILE = "schedules_live.json"
FRESH = (101, 102, 103)
SEARCHED = "searched"
ARMS: Mapping[str, Mapping[str, Any]] = {
    SEARCHED: {"schedule": "linear", "decay_start": uniform(0.0, 0.9), "floor": uniform(0.0, 0.5)},
    "constant": {"schedule": "constant"},
    "cosine": {"schedule": "cosine"},
    "linear": {"schedule": "linear"},
}
SIZES = {"shakespeare": 300, "residual": 597, "cifar10": 1000}
"""Examples to train on, by task."""
MAX_T = 9

Row = dict[str, Any]


def measure(task: Task, arm: str, trials: int) -> Row:
    """Search one arm, and train its winner with fresh seeds."""
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        found = tune(
            task.model_fn,
            {**task.space(), **ARMS[arm]},
            train_data=task.train,
            val_data=task.held,
            objective=objective(task.kind),
            metric="val_score",
            mode=task.mode,
            num_samples=trials,
            max_t=task.max_t,
            storage_path=folder,
            name="run",
            progress=False,
        )
        cost = found.cost.full_trainings(found.cost.seconds, task.max_t)
    tests = []
    for seed in FRESH:
        own = seeds(task, 0, seed)
        *_, last = train(task, found.best_config, own, build(task, found.best_config, own))
        tests.append(last["test"])
    return {"task": task.name, "arm": arm, "config": found.best_config, "tests": tests, "full_trainings": cost}


def of_task(rows: Sequence[Row], task: str) -> dict[str, list[float]]:
    """Return a task's test scores by arm, the higher the better."""
    sign = -1 if task == "shakespeare" else 1
    return {row["arm"]: [sign * test for test in row["tests"]] for row in rows if row["task"] == task}


def spread(arms: Mapping[str, Sequence[float]]) -> float:
    """Return the standard deviation between seeds, the same for all arms of a task."""
    return math.sqrt(fmean(stdev(tests) ** 2 for tests in arms.values()))


def gain(arms: Mapping[str, Sequence[float]], over: str) -> float:
    """Return how much better the searched schedule is than another, in standard deviations between seeds."""
    return (fmean(arms[SEARCHED]) - fmean(arms[over])) / spread(arms)


def markdown(result: Row) -> str:
    """A table with a line for each arm."""
    where = result["environment"]
    lines = [
        "# Schedules as hyperparameters, live",
        "",
        f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, {where['date']}. "
        f"Rerun: `{where['command']}`. "
        f"Each arm is a default `tune` of {where['trials']} trials and {MAX_T} epochs, with seed 0. Its winner trains "
        "with three fresh seeds; the test score after the last epoch counts: the loss in nats on shakespeare, the "
        "accuracy elsewhere. The task's data are a part: "
        + ", ".join(f"{size} examples of {name}" for name, size in SIZES.items())
        + ".",
        "",
        "| task | schedule | test scores | mean | searched is better by | winner |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        arms = of_task(result["rows"], row["task"])
        better = "" if SEARCHED not in arms or row["arm"] == SEARCHED else f"{gain(arms, row['arm']):.1f} sd"
        tests = ", ".join(f"{test:.4g}" for test in row["tests"])
        config = {k: v for k, v in row["config"].items() if k not in ("optimizer", "schedule")}
        words = " ".join(f"{k}={v:.3g}" for k, v in config.items())
        lines.append(f"| {row['task']} | {row['arm']} | {tests} | {fmean(row['tests']):.4g} | {better} | {words} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the arms that are missing, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--data", type=Path, default=Path(DEFAULT_DATA))
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    path: Path = asked.out / FILE
    result: Row = json.loads(path.read_text()) if path.exists() else {"rows": []}
    result["environment"] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "trials": asked.trials,
        "command": "python -m benchmarks.schedules_live",
    }
    for name in asked.tasks:
        whole = load_task(name, asked.data)
        train_on = tuple(part[: SIZES[name]] for part in whole.train)
        task = replace(whole, train=train_on, max_t=MAX_T)
        for arm in ARMS:
            if any((row["task"], row["arm"]) == (name, arm) for row in result["rows"]):
                continue
            result["rows"].append(measure(task, arm, asked.trials))
            print(result["rows"][-1], flush=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
            path.with_suffix(".md").write_text(markdown(result))


if __name__ == "__main__":
    main()
