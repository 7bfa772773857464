"""One cell of the comparison: a task, a method and a seed, in a process of its own.

python -m benchmarks.vs_asha.cell digits tune 0 --out cell.json
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo  # imported here, because the first optimizer would import it in the timed search

from benchmarks.result_files import DEFAULT_DATA, cpu_model, read, save_lines
from benchmarks.tasks.load import TASKS, load_task
from benchmarks.tasks.task import Config, Task
from benchmarks.vs_asha.methods import METHODS, TOP_K, WIDTH_RATIO
from benchmarks.vs_asha.search import GRACE_PERIOD, REDUCTION_FACTOR, Event, configurations, seeds
from benchmarks.vs_asha.statistics import is_timed
from benchmarks.vs_asha.training import build, scores, train
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.space.domains import to_ray

RETRAINED = 10_000
"""Added to the winner's number for each training again, so that each starts from other weights."""
AGAIN = 3
"""The number of times that a winner's configuration is trained again."""
PLACE = ("cpu", "gpu", "cores of its own", "threads", "torch")
"""Entries of the environment that decide the result of training a configuration, and its duration."""


def measure(task: Task, method: str, seed: int, folder: Path, *, timed: bool = True) -> dict[str, Any]:
    """Run a search, then train its winner again, plainly and from other weights.

    These trainings show the least that a search can cost, the spread between seeds, and the quality of the
    configuration with other weights.

    Args:
        folder: Folder of earlier cells. If one has the same winner, it has the results of training it again. Then one
            training is enough, to measure its time, and none if times do not count.
        timed: False if other work shares the machine, so that this cell's times do not count.
    """
    environment = {
        **environment_of("torch", "ray", "numpy"),
        **({"gpu": torch.cuda.get_device_name()} if task.device == "cuda" else {}),
        "timed": timed,
    }
    outcome = METHODS[method](task, seed)
    task = task.on_device()
    config = configurations(task, seed)[outcome.winner]
    last = [event for event in outcome.events if event.trial == outcome.winner and event.full_size][-1]
    winner = {"trial": outcome.winner, "config": config, "epochs": last.epoch}
    cell = {
        "task": task.name,
        "method": method,
        "seed": seed,
        "mode": task.mode,
        "score": {"class": "accuracy", "token": "loss in nats", "field": "mean squared error"}[task.kind],
        "reduced": task.reduced,
        "wall": round(outcome.wall, 3),
        "apart": {name: round(seconds, 3) for name, seconds in outcome.apart.items()},
        "winner": winner | _rounded(scores(task, outcome.model, config["batch_size"])),
        "settings": {
            **_settings(task),
            "full_trainings": outcome.full_trainings,
            "keep": outcome.keep,
            "averaged": outcome.keep == "best" and "far ahead win",
        },
        "environment": environment,
        "events": [_compact(event) for event in outcome.events],
    }
    again = trained_before(cell, folder)
    if again is None:
        again = train_again(task, config, outcome.winner, seed)
    elif timed:  # The machine's speed may have changed since the earlier training.
        again["floor"] = train_again(task, config, outcome.winner, seed, times=1)["floor"]
    return cell | again


def trained_before(cell: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return an earlier cell's results of training the same winner again, on the same kind of machine, or None."""
    where, winner = cell["environment"], cell["winner"]
    for path in sorted(folder.glob(f"{cell['task']}-*-{cell['seed']}.json")):
        other = read(path)
        there, its_winner = other["environment"], other["winner"]
        same = other["task"] == cell["task"] and other["reduced"] == cell["reduced"]
        same &= all(its_winner[name] == winner[name] for name in ("trial", "config"))
        same &= all(there.get(name) == where.get(name) for name in PLACE)
        if same and "again" in other and is_timed(other) >= is_timed(cell):
            return {name: other[name] for name in ("floor", "again")}
    return None


def train_again(task: Task, config: Config, trial: int, seed: int, times: int = AGAIN) -> dict[str, Any]:
    """Train a configuration plainly to its end, several times, each from other weights."""
    again, took = list[dict[str, float]](), list[float]()
    for time_again in range(1, times + 1):
        began = time.perf_counter()
        other = seeds(task, time_again * RETRAINED + trial, seed)
        again.append([*train(task, config, other, build(task, config, other))][-1])
        took.append(time.perf_counter() - began)
    floor = {"seconds": round(median(took), 3)} | _rounded(again[0])
    return {"floor": floor, "again": [_short(trained["test"]) for trained in again]}


def environment_of(*packages: str) -> dict[str, Any]:
    """Return place and time of a cell, how busy the machine is, and the versions of packages."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cores of its own": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load at start": round(os.getloadavg()[0], 2),
        "busy before": busy(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def busy(seconds: float = 1.0) -> float:
    """Return the share of all cores' time that other processes take while this one sleeps; NaN if it is unknown.

    The load average is no replacement, because it covers the last minute, in which the previous cell may have run.
    """
    try:
        before = _jiffies()
        time.sleep(seconds)
        after = _jiffies()
    except FileNotFoundError:
        return math.nan
    idle, total = (now - then for now, then in zip(after, before))
    return round(1 - idle / total, 3)


def _jiffies() -> tuple[int, int]:
    """Return the time that all cores were idle, and all of their time (`man 5 proc`)."""
    user, nice, system, idle, iowait, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return idle + iowait, user + nice + system + idle + iowait + sum(rest)


def _settings(task: Task) -> dict[str, Any]:
    return {
        "trials": task.num_samples,
        "max_t": task.max_t,
        "grace_period": GRACE_PERIOD,
        "reduction_factor": REDUCTION_FACTOR,
        "top_k": TOP_K,
        "first_look": TuneConfig(max_t=task.max_t).first_look,
        "last_look": TuneConfig(max_t=task.max_t).last_look,
        "surrogate": WIDTH_RATIO,
        "split": task.split,
        "space": {name: getattr(domain, "domain_str", domain) for name, domain in to_ray(task.space()).items()},
        "examples": {
            "train": len(task.train[0]),
            **{part: int((task.held[-1][:, i] > 0).sum()) for i, part in enumerate(("validation", "test"))},
        },
    }


def _rounded(measured: dict[str, float]) -> dict[str, float | None]:
    return {name: _short(value) for name, value in measured.items()}


def _short(value: float) -> float | None:
    """Round to six digits; return None for a value that JSON cannot hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _compact(event: Event) -> list[float | None]:
    *_, score, test = event
    return [round(event.seconds, 3), event.trial, int(event.full_size), event.epoch, _short(score), _short(test)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one cell and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("method", choices=list(METHODS))
    parser.add_argument("seed", type=int)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--untimed", action="store_true", help="other work shares the machine: times do not count")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="to train on; by default the task's own")
    parser.add_argument("--data", type=Path, default=Path(DEFAULT_DATA))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    task = load_task(given.task, given.data, reduced=given.reduced).of_seed(given.seed)
    task = replace(task, device=given.device or task.device)
    save_lines(given.out, measure(task, given.method, given.seed, given.out.parent, timed=not given.untimed), "events")


if __name__ == "__main__":
    main()
