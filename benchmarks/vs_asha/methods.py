"""The searches that are compared. Each starts with data in memory and ends with the trained full-size model in hand.

Configurations, initial weights and the order of examples are the same for all methods at one seed.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from benchmarks.tasks.task import Task, objective
from benchmarks.vs_asha.ray import ray_asha
from benchmarks.vs_asha.search import (
    GRACE_PERIOD,
    REDUCTION_FACTOR,
    Event,
    Searched,
    best_finished,
    configurations,
    seeds,
)
from benchmarks.vs_asha.training import build, train
from hydro_rasda import LocalBackend, RaceConfig, SweepConfig, TuneResult, tune
from hydro_rasda.schedulers import AsyncSuccessiveHalving, Decision
from hydro_rasda.settings.config import TuneConfig


def tuned(task: Task, folder: str | Path, space: Mapping[str, Any] | None = None, **settings: Any) -> TuneResult:
    """Search by the validation score, without progress.

    Args:
        folder: The run is kept in its folder "run".
        settings: Further arguments of `tune`. They may replace the task's `num_samples` and `max_t`.
    """
    given = {"num_samples": task.num_samples, "max_t": task.max_t, **settings}
    return tune(
        task.model_fn,
        task.space() if space is None else space,
        train_data=task.train,
        val_data=task.held,
        objective=objective(task.kind),
        metric="val_score",
        mode=task.mode,
        storage_path=folder,
        name="run",
        progress=False,
        **given,
    )


TOP_K = 4
WIDTH_RATIO = 1 / 8


def asha(task: Task, seed: int) -> Searched:
    """Run ASHA, one trial after another in this process, on all threads or on the GPU."""
    rule = AsyncSuccessiveHalving(task.max_t, GRACE_PERIOD, REDUCTION_FACTOR, mode=task.mode)
    rungs, events, finished = rule.init(), list[Event](), dict[int, nn.Module]()
    began = time.perf_counter()
    task = task.on_device()
    for number, config in enumerate(configurations(task, seed)):
        given = seeds(task, number, seed)
        model = build(task, config, given)
        for epoch, measured in enumerate(train(task, config, given, model), start=1):
            events.append(Event(time.perf_counter() - began, number, True, epoch, **measured))
            rungs, decision = rule.report(rungs, str(number), epoch, measured["score"])
            if epoch == task.max_t:
                finished[number] = model
            if decision is Decision.STOP:
                break
    winner = best_finished(task, events)
    return Searched(time.perf_counter() - began, events, winner, finished[winner])


def hydro_rasda(
    task: Task,
    seed: int,
    surrogate: float = WIDTH_RATIO,
    fusion: int | Literal["auto"] = "auto",
    ema: float = RaceConfig.ema,
    **settings: Any,
) -> Searched:
    """Run `tune()` with an empty cache, so that the run itself measures how wide groups may be."""
    with tempfile.TemporaryDirectory(prefix="vs-asha-tune-") as folder:
        os.environ["HYDRO_RASDA_CACHE"] = folder
        began = time.perf_counter()
        result = tuned(
            task,
            folder,
            sweep=SweepConfig(
                surrogate=surrogate, grace_period=GRACE_PERIOD, reduction_factor=REDUCTION_FACTOR, fusion=fusion
            ),
            race=RaceConfig(top_k=TOP_K, ema=ema),
            seed=seed,
            backend=LocalBackend(task.device),
            **settings,
        )
        model = result.best_model()
        wall = time.perf_counter() - began
        with open(result.path / "journal.jsonl") as lines:
            journal = [json.loads(line) for line in lines]
    cost = result.cost
    apart = {
        "sweep": cost.sweep_seconds,
        "of it measuring widths": sum(u["seconds"] for u in journal if "/widths-of-" in u.get("key", "")),
        "middle heat": cost.middle_seconds,
        "full size": cost.race_seconds,
    }
    price = settings.get("full_trainings", TuneConfig.full_trainings)
    return Searched(wall, timeline(journal, wall), result.best_trial, model, apart, keep="best", full_trainings=price)


def timeline(journal: Sequence[Mapping[str, Any]], wall: float) -> list[Event]:
    """Return when each epoch of a run was done, from its journal.

    The journal says for each unit of work when it was done, in seconds since the run's folder was opened, and how long
    it took the device. Times are counted back from the end, with a unit's epochs spread evenly over its duration. They
    are never early. They are late by the time between the last unit and the end. Times of units that shared the device
    are later still.

    Args:
        journal: Its lines, in order: a unit's metrics, then the unit.
        wall: Seconds of the whole run.
    """
    events: list[Event] = []
    metrics: list[Mapping[str, Any]] = []
    units = [line for line in journal if line["event"] == "unit"]
    late = wall - units[-1]["at"]
    for line in journal:
        if line["event"] == "metrics":
            metrics.append(line)
        elif line["event"] == "unit":
            epochs = [metric["epoch"] for metric in metrics]
            for metric in metrics:
                left = (max(epochs) - metric["epoch"]) / (max(epochs) - min(epochs) + 1)
                at = line["at"] + late - left * line["seconds"]
                score, test = (math.nan if metric[name] is None else metric[name] for name in ("val_score", "val_test"))
                events.append(Event(at, metric["trial"], metric["heat"] == "race", metric["epoch"], score, test))
            metrics = []
    return sorted(events)


Method = Callable[[Task, int], Searched]


# With this budget, all finalists train to the end.
_NO_RASDA: dict[str, Any] = {"full_trainings": TOP_K}

METHODS: dict[str, Method] = {
    "ray_asha": ray_asha,
    "asha": asha,
    "fusion": lambda task, seed: hydro_rasda(task, seed, surrogate=1.0, **_NO_RASDA),
    "surrogate": lambda task, seed: hydro_rasda(task, seed, fusion=1, **_NO_RASDA),
    "both": lambda task, seed: hydro_rasda(task, seed, **_NO_RASDA),
    "tune": hydro_rasda,
    "tune_two": lambda task, seed: hydro_rasda(task, seed, full_trainings=2),
    "tune_one": lambda task, seed: hydro_rasda(task, seed, full_trainings=1),
}
"""The searches by name: two baselines, the ablations, `tune` with its defaults, and `tune` at two lower prices."""
