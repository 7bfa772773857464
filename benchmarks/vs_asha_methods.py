"""The searches that are compared. Each starts with data in memory and ends with the trained full-size model in hand.

Configurations, initial weights and the order of examples are the same for all methods at one seed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.vs_asha_tasks import Config, Task, objective
from benchmarks.vs_asha_training import Seeds, build, state, train
from hydro_rasda import RASDAConfig, tune
from hydro_rasda.schedulers import AsyncSuccessiveHalving, Decision
from hydro_rasda.seeds import derive_seed
from hydro_rasda.space import sample

GRACE_PERIOD = 1
REDUCTION_FACTOR = 3
TOP_K = 4
WIDTH_RATIO = 1 / 8


class Event(NamedTuple):
    """A trial's scores after an epoch.

    Attributes:
        seconds: Since the search began.
        trial: Its number.
        full_size: Whether it was the full-size model that trained, not a surrogate.
        epoch: Epochs trained, from 1; a finalist starts at full size anew.
        score: On the validation set; NaN where it diverged.
        test: On the test set.
    """

    seconds: float
    trial: int
    full_size: bool
    epoch: int
    score: float
    test: float


@dataclass
class Outcome:
    """What a search gave.

    Attributes:
        wall: Seconds from the call to the trained model in hand, without the processes' imports.
        events: In order of time.
        winner: Number of the best trial.
        model: The winner, trained at full size.
        apart: Parts of `wall` that are worth knowing, in seconds.
    """

    wall: float
    events: list[Event]
    winner: int
    model: nn.Module
    apart: dict[str, float] = field(default_factory=dict)


def configurations(task: Task, seed: int) -> list[Config]:
    """The configurations that `tune` samples for this seed."""
    return sample(task.space(), task.num_samples, seed)


def seeds(task: Task, trial: int, seed: int) -> Seeds:
    """The seeds that `tune` derives for a full-size trial."""
    shuffles = [derive_seed(seed, "shuffle", epoch) for epoch in range(task.max_t)]
    return Seeds(derive_seed(seed, "weights", trial), shuffles)


def asha(task: Task, seed: int) -> Outcome:
    """ASHA, one trial after another in this process, on all threads."""
    rule = AsyncSuccessiveHalving(task.max_t, GRACE_PERIOD, REDUCTION_FACTOR, task.mode)
    rungs, events, finished = rule.init(), list[Event](), dict[int, nn.Module]()
    began = time.perf_counter()
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
    winner = _best_finished(task, events)
    return Outcome(time.perf_counter() - began, events, winner, finished[winner])


def ray_asha(task: Task, seed: int) -> Outcome:
    """Ray Tune's ASHA as a careful user runs it.

    One CPU slot for each trial, actors that are used again, data in the object store once, and a checkpoint only of
    those trials that train to the end, one of which wins.
    """
    import ray
    from ray.tune import RunConfig, Tuner, grid_search, with_parameters
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
            _ray_trial,
            task=replace(task, train=(), held=()),
            arrays=arrays,
            configs=configs,
            seeds=[seeds(task, number, seed) for number in range(len(configs))],
        )
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
        winner = _best_finished(task, recorder.events)
        model = build(task, configs[winner], seeds(task, winner, seed))
        checkpoint = next(r.checkpoint for r in results if r.config["trial"] == winner)
        with checkpoint.as_directory() as path:
            model.load_state_dict(torch.load(Path(path, "model.pt"), weights_only=True))
        wall = time.perf_counter() - began
    finally:
        ray.shutdown()
        shutil.rmtree(folder)
    first = recorder.first_began - clock
    return Outcome(wall, recorder.events, winner, model, {"ray.init": ready, "until the first trial began": first})


def _ray_trial(
    config: Mapping[str, int],
    task: Task,
    arrays: Mapping[str, Sequence[Any]],
    configs: Sequence[Config],
    seeds: Sequence[Seeds],
) -> None:
    """What Ray's workers run."""
    from ray.tune import Checkpoint, report

    began = time.time()
    with warnings.catch_warnings():
        # Arrays of the object store cannot be written to; nobody here does.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        held, examples = (tuple(torch.from_numpy(a) for a in arrays[part]) for part in ("held", "train"))
    task = replace(task, train=examples, held=held)
    number = config["trial"]
    model = build(task, configs[number], seeds[number])
    worst = -1e9 if task.mode == "max" else 1e9
    for epoch, measured in enumerate(train(task, configs[number], seeds[number], model), start=1):
        # ASHA cannot rank what is not a number.
        told = {"score": measured["score"] if math.isfinite(measured["score"]) else worst}
        told |= {"test": measured["test"], "epoch": epoch, "began": began}
        if epoch < task.max_t:
            report(told)
            continue
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state(model), Path(folder, "model.pt"))
            report(told, checkpoint=Checkpoint.from_directory(folder))


def _recorder(began: float) -> Any:
    """A callback that notes when this process hears of each epoch."""
    from ray.tune import Callback

    class Recorder(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.events: list[Event] = []
            self.first_began = math.inf

        def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict, **info: Any) -> None:
            score = result["score"] if abs(result["score"]) < 1e9 else math.nan
            now = time.perf_counter() - began
            self.events.append(Event(now, trial.config["trial"], True, result["epoch"], score, result["test"]))
            self.first_began = min(self.first_began, result["began"])

    return Recorder()


def _best_finished(task: Task, events: Sequence[Event]) -> int:
    """The best of the trials that trained to the end: the others have no checkpoint."""
    done = [e for e in events if e.epoch == task.max_t and math.isfinite(e.score)]
    if not done:
        raise RuntimeError(f"no trial of {task.name} trained for {task.max_t} epochs with a finite score")
    sign = 1 if task.mode == "max" else -1
    return max(done, key=lambda e: (sign * e.score, -e.trial)).trial


def hydro_rasda(task: Task, seed: int, **settings: Any) -> Outcome:
    """`tune()`, with nothing measured before: how wide groups may be is measured in the run."""
    with tempfile.TemporaryDirectory(prefix="vs-asha-tune-") as folder:
        os.environ["HYDRO_RASDA_CACHE"] = folder
        began = time.perf_counter()
        result = tune(
            task.model_fn,
            task.space(),
            train_data=task.train,
            val_data=task.held,
            objective=objective(task.kind),
            metric="val_score",
            mode=task.mode,
            num_samples=task.num_samples,
            max_t=task.max_t,
            grace_period=GRACE_PERIOD,
            reduction_factor=REDUCTION_FACTOR,
            top_k=TOP_K,
            storage_path=folder,
            name="run",
            seed=seed,
            progress=False,
            **({"surrogate": WIDTH_RATIO} | settings),
        )
        model = result.best_model()
        wall = time.perf_counter() - began
        with open(result.path / "journal.jsonl") as lines:
            journal = [json.loads(line) for line in lines]
    cost = result.cost
    apart = {
        "sweep": cost.surrogate_seconds,
        "of it measuring widths": sum(u["seconds"] for u in journal if "/widths-of-" in u.get("key", "")),
        "full size": cost.target_seconds,
    }
    winner = next(r.trial for r in result.trials if r.config == result.best_config)
    return Outcome(wall, timeline(journal, wall), winner, model, apart)


def timeline(journal: Sequence[Mapping[str, Any]], wall: float) -> list[Event]:
    """When each epoch of a run was done, from its journal.

    The journal says how long each unit of work took. Counted back from the end, and spread evenly over a unit's epochs,
    that gives times which are late by what passed between units, and never early.

    Args:
        journal: Its lines, in order: a unit's metrics, then the unit.
        wall: Seconds of the whole run.
    """
    events: list[Event] = []
    end = wall
    unit: Mapping[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []

    def add() -> None:
        if not metrics:
            return
        epochs = [line["epoch"] for line in metrics]
        first, span = min(epochs) - 1, max(epochs) - min(epochs) + 1
        for line in metrics:
            at = end - unit["seconds"] * (1 - (line["epoch"] - first) / span)
            score, test = (math.nan if line[name] is None else line[name] for name in ("val_score", "val_test"))
            events.append(Event(at, line["trial"], line["stage"] == "target", line["epoch"], score, test))

    for line in reversed(journal):
        if line["event"] == "unit":
            add()
            end -= unit.get("seconds", 0.0)
            unit, metrics = line, []
        elif line["event"] == "metrics":
            metrics.append(line)
    add()
    return sorted(events)


Method = Callable[[Task, int], Outcome]


def _no_rasda(task: Task) -> dict[str, Any]:
    """All finalists train to the end."""
    return {"rasda": RASDAConfig(grace_period=task.max_t)}


METHODS: dict[str, Method] = {
    "ray_asha": ray_asha,
    "asha": asha,
    "fusion": lambda task, seed: hydro_rasda(task, seed, surrogate=1.0, **_no_rasda(task)),
    "surrogate": lambda task, seed: hydro_rasda(task, seed, fusion=1, **_no_rasda(task)),
    "both": lambda task, seed: hydro_rasda(task, seed, **_no_rasda(task)),
    "tune": hydro_rasda,
}
"""By name: the two baselines, the ablations, and `tune` with its defaults."""
