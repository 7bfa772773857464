"""Schedules as hyperparameters, live: a searched decay against the best constant, cosine and linear schedules.

    python -m benchmarks.schedules_live [--tasks shakespeare residual cifar10] [--seeds 0 1 2] [--data FOLDER]

Each arm is a default `tune` of the same seed, so the same learning rates, with its own schedule in the space. The
winner of each then trains fully with three fresh seeds, by plain torch; its last epoch's test score counts. It measures
quality alone, so load does not matter. It rewrites `schedules_live.{json,md}` in `benchmarks/results` after each arm,
and leaves out the arms that are there.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.result_files import Row, columns, environment, options, read, save
from benchmarks.tasks.load import load_task
from benchmarks.tasks.task import Task
from benchmarks.tasks.tuned import tuned
from benchmarks.vs_asha.search import seeds
from benchmarks.vs_asha.training import build, train
from hydro_rasda import uniform

FILE = "schedules_live.json"
FRESH = (101, 102, 103)
SEARCHED = "searched"
ARMS: Mapping[str, Mapping[str, Any]] = {
    SEARCHED: {"schedule": "linear", "decay_start": uniform(0.0, 0.9), "floor": uniform(0.0, 0.2)},
    "constant": {"schedule": "constant"},
    "cosine": {"schedule": "cosine"},
    "linear": {"schedule": "linear"},
}
SIZES = {"shakespeare": 1000, "residual": 597, "cifar10": 2000}
"""Examples to train on, by task."""
MAX_T = 9


def measure(task: Task, arm: str, seed: int) -> Row:
    """Search one arm, and train its winner with fresh seeds."""
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        found = tuned(task, folder, {**task.space(), **ARMS[arm]}, seed=seed)
        cost = found.cost.full_trainings(found.cost.seconds, task.max_t)
    tests = []
    for fresh in FRESH:
        own = seeds(task, 0, fresh)
        *_, last = train(task, found.best_config, own, build(task, found.best_config, own))
        tests.append(last["test"])
    row = {"task": task.name, "arm": arm, "seed": seed, "trials": task.num_samples, "config": found.best_config}
    return row | {"tests": tests, "full_trainings": cost}


def of_task(rows: Sequence[Row], task: str) -> dict[str, list[list[float]]]:
    """Return a task's test scores by arm, a list for each search, the higher the better."""
    sign, arms = -1 if task == "shakespeare" else 1, dict[str, list[list[float]]]()
    for row in rows:
        if row["task"] == task:
            arms.setdefault(row["arm"], []).append([sign * test for test in row["tests"]])
    return arms


def spread(arms: Mapping[str, Sequence[Sequence[float]]]) -> float:
    """Return the standard deviation between seeds of a winner, the same for all searches of a task."""
    return math.sqrt(fmean(stdev(tests) ** 2 for searches in arms.values() for tests in searches))


def gain(arms: Mapping[str, Sequence[Sequence[float]]], over: str) -> float:
    """Return how much better the searched schedule is than another, in standard deviations between seeds.

    Only search seeds that both have count.
    """
    pairs = [*zip(arms[SEARCHED], arms[over])]
    return fmean(fmean(own) - fmean(other) for own, other in pairs) / spread(arms)


def markdown(result: Row) -> str:
    """A table with a line for each arm, and one with a line for each search."""
    where, arms_of = result["environment"], {task: of_task(result["rows"], task) for task in SIZES}
    means = [
        (
            task,
            arm,
            len(searches),
            f"{abs(fmean(map(fmean, searches))):.4g}",
            "" if arm == SEARCHED else better(arms, arm),
        )
        for task, arms in arms_of.items()
        for arm, searches in arms.items()
    ]
    searches = []
    for row in result["rows"]:
        tests = ", ".join(f"{test:.4g}" for test in row["tests"])
        config = {k: v for k, v in row["config"].items() if k not in ("optimizer", "schedule")}
        words = " ".join(f"{k}={v:.3g}" for k, v in config.items())
        searches.append((row["task"], row["arm"], row["seed"], tests, f"{row['full_trainings']:.1f}", words))
    return f"""# Schedules as hyperparameters, live

{where["cpu"]}, {where["cores"]} cores, torch {where["torch"]}, {where["date"]}. \
Rerun: `{where["command"]}`. \
Each arm is a default `tune` of the task's own trials and {MAX_T} epochs. Its winner trains with three fresh \
seeds; the test score after the last epoch counts: the loss in nats on shakespeare, the accuracy elsewhere. \
Examples to train on: {", ".join(f"{size:,} of {name}" for name, size in SIZES.items())}.

{columns(["task", "schedule", "searches", "mean test score", "searched is better by"], means)}

{columns(["task", "schedule", "seed", "test scores", "trainings", "winner"], searches)}
"""


def better(arms: Mapping[str, Sequence[Sequence[float]]], arm: str) -> str:
    """`gain` in words; "" where nothing was searched."""
    return f"{gain(arms, arm):+.1f} sd" if SEARCHED in arms else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the arms that are missing, and write the files."""
    parser = options(__doc__, data=True)
    parser.add_argument("--tasks", nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked = parser.parse_args(arguments)
    path: Path = asked.out / FILE
    result: Row = read(path, {"rows": []})
    result["environment"] = environment("torch", command="python -m benchmarks.schedules_live")
    for name, seed in itertools.product(asked.tasks, asked.seeds):
        whole = load_task(name, asked.data)
        task = replace(whole, train=tuple(part[: SIZES[name]] for part in whole.train), max_t=MAX_T)
        for arm in ARMS:
            if any((row["task"], row["arm"], row["seed"]) == (name, arm, seed) for row in result["rows"]):
                continue
            result["rows"].append(measure(task, arm, seed))
            print(result["rows"][-1], flush=True)
            save(path, result, markdown(result))


if __name__ == "__main__":
    main()
