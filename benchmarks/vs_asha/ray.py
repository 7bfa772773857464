"""Ray Tune's ASHA, as a careful user runs it."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.tasks.task import Task
from benchmarks.vs_asha.ray_trial import DIVERGED, ray_trial
from benchmarks.vs_asha.search import (
    GRACE_PERIOD,
    REDUCTION_FACTOR,
    Event,
    Searched,
    best_finished,
    configurations,
    seeds,
)
from benchmarks.vs_asha.training import build


def ray_asha(task: Task, seed: int) -> Searched:
    """Run Ray Tune's ASHA as a careful user does.

    Each trial has one CPU slot, and one GPU if the task needs one. Actors are reused, and data lie in the object store
    once. Only trials that train to the end write a checkpoint, because one of them wins.
    """
    import ray
    from ray.tune import RunConfig, Tuner, grid_search, with_parameters, with_resources
    from ray.tune import TuneConfig as RayTuneConfig
    from ray.tune.schedulers import ASHAScheduler

    configs = configurations(task, seed)
    arrays = {"train": [t.numpy() for t in task.train], "held": [t.numpy() for t in task.held]}
    folder = tempfile.mkdtemp(prefix="vs-asha-ray-")
    began, clock = time.perf_counter(), time.time()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local", num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    try:
        ready = time.perf_counter() - began
        recorder = _recorder(began)
        trainable = with_parameters(
            ray_trial,
            task=replace(task, train=(), held=()),
            arrays=arrays,
            configs=configs,
            seeds=[seeds(task, number, seed) for number in range(len(configs))],
        )
        if task.device == "cuda":
            trainable = with_resources(trainable, {"CPU": 1, "GPU": 1})
        results = Tuner(
            trainable,
            param_space={"trial": grid_search(list(range(len(configs))))},
            tune_config=RayTuneConfig(
                metric="score",
                mode=task.mode,
                reuse_actors=True,
                scheduler=ASHAScheduler(max_t=task.max_t, grace_period=GRACE_PERIOD, reduction_factor=REDUCTION_FACTOR),
            ),
            run_config=RunConfig(storage_path=folder, verbose=0, callbacks=[recorder]),
        ).fit()
        if results.num_errors:
            raise RuntimeError(f"{results.num_errors} of Ray's trials failed; the first said: {results.errors[0]}")
        winner = best_finished(task, recorder.events)
        model = build(task, configs[winner], seeds(task, winner, seed))
        checkpoint = next(r.checkpoint for r in results if r.config["trial"] == winner)
        with checkpoint.as_directory() as path:
            model.load_state_dict(torch.load(Path(path, "model.pt"), map_location=task.device, weights_only=True))
        wall = time.perf_counter() - began
    finally:
        ray.shutdown()
        shutil.rmtree(folder)
    first = recorder.first_began - clock
    return Searched(wall, recorder.events, winner, model, {"ray.init": ready, "until the first trial began": first})


def _recorder(began: float) -> Any:
    """Make a callback that notes when this process hears of each epoch."""
    from ray.tune import Callback

    class Recorder(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.events: list[Event] = []
            self.first_began = math.inf

        def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict, **info: Any) -> None:
            score = result["score"] if abs(result["score"]) < DIVERGED else math.nan
            now = time.perf_counter() - began
            self.events.append(Event(now, trial.config["trial"], True, result["epoch"], score, result["test"]))
            self.first_began = min(self.first_began, result["began"])

    return Recorder()
