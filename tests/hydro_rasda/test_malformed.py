"""Every public argument, handed what it is not for: taken rightly, or refused by its name before any work."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.tune.schedulers import FIFOScheduler
from torch import nn

from benchmarks.packing_virtual import Interference, Machine, simulate_packing
from hydro_rasda import (
    LocalBackend,
    RaceConfig,
    RASDAScheduler,
    RayBackend,
    SweepConfig,
    Worker,
    elastic,
    grid_search,
    load,
    loguniform,
    tune,
)
from hydro_rasda.backends.ray import RescaledLR, lr_factor, read_journal
from hydro_rasda.data import make_batches
from hydro_rasda.packing import Device, Estimate, Task, pack
from hydro_rasda.schedulers import Job, first_fit
from hydro_rasda.simulator import (
    Cluster,
    CostModel,
    Link,
    NodeKind,
    Workload,
    power_law,
    read_past_run,
    simulate,
    synchronous_halving,
)
from hydro_rasda.simulator import Plan as SimulatedPlan
from tests.malformed import Right, begin, either, faults, flag, instance, integer, nothing, number, one_of

X, Y = torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)
SPACE = {"lr": loguniform(1e-3, 1)}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths that are right are relative ones."""
    monkeypatch.chdir(tmp_path)


def tuned(**arguments: Any) -> object:
    known = {"model_fn": begin, "space": SPACE, "train_data": (X, Y), "val_data": (X, Y), "num_samples": 1}
    return tune(**{**known, "progress": False, "storage_path": "runs", **arguments})


def rasda(**arguments: Any) -> object:
    return RASDAScheduler(**{"metric": "loss", "mode": "min", **arguments})


def worker() -> Worker:
    options = {"milestones": (), "checkpoint_every": None, "timeout_s": 1.0, "backend": None, "gpus": 0, "threads": 1}
    job: dict[str, Any] = {
        **options,
        "config": {},
        "rank": 1,
        "world_size": 2,
        "workers": 2,
        "trial": "t",
        "checkpoint": None,
    }
    return Worker(job, None, torch.device("cpu"))


def packed(**arguments: Any) -> object:
    known = {"jobs": [["true"]], "devices": [Device("cpu", 1.0)], "verbose": False, "policy": begin}
    return pack(**{**known, **arguments})


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def simulated(**arguments: Any) -> object:
    known = {
        "plan": SimulatedPlan(synchronous_halving(max_t=2)),
        "workload": power_law(2, 2, 0),
        "cluster": Cluster.uniform(2),
        "cost": CostModel(1.0, 1.0),
    }
    return simulate(**{**known, **arguments})


JOB = Job("a", 1.0, 1.0, 1.0)
IN_PAIRS = Interference({})


def packing(**arguments: Any) -> object:
    known = {"policy": first_fit, "jobs": [JOB], "machines": [Machine("m", 1.0)], "interference": IN_PAIRS}
    return simulate_packing(**{**known, **arguments})


positive, at_least_0, count, count_or_none = (
    number(0, open_=True),
    number(0),
    integer(1),
    either(one_of(None), integer(1)),
)
folder: Right = lambda v: isinstance(v, str | Path) and str(v) in ("no", "0.1", "a/b")  # noqa: E731
name: Right = lambda v: isinstance(v, str) and v in ("no", "0.1")  # noqa: E731
text: Right = lambda v: isinstance(v, str) and v != ""  # noqa: E731
rows: Right = lambda v: bool(v) if isinstance(v, list) else getattr(v, "ndim", 0) > 0  # noqa: E731
none_only = one_of(None)
rows_of_grid: Right = lambda v: isinstance(v, list | range | tuple) and len(v) > 0  # noqa: E731

TUNE: dict[str, Right] = {
    "model_fn": nothing,
    "space": nothing,
    "train_data": rows,
    "val_data": rows,
    "loss_fn": none_only,
    "objective": none_only,
    "metric": text,
    "mode": nothing,
    "metrics": none_only,
    "num_samples": integer(1, 10**6),
    "max_t": integer(1, 10**6),
    "train": none_only,
    "full_trainings": at_least_0,
    "time_budget_s": either(none_only, positive),
    "stop_at": either(none_only, number()),
    "sweep": nothing,
    "race": nothing,
    "backend": nothing,
    "storage_path": folder,
    "name": either(none_only, name),
    "resume": nothing,
    "seed": integer(0, 2**63 - 1),
    "progress": flag,
    "callbacks": lambda v: isinstance(v, list | tuple) and not v,
}
"""By argument of `tune`, what it may take of the values."""

SWEEP: dict[str, Right] = {
    "surrogate": either(number(0, 1, open_=True), one_of(1)),
    "grace_period": integer(1, 27),
    "reduction_factor": integer(2),
    "rule": nothing,
    "searcher": none_only,
    "first": lambda v: isinstance(v, list | tuple) and not v,
    "fusion": count,
    "check_transfer": flag,
}

RACE: dict[str, Right] = {
    "top_k": count,
    "keep": nothing,
    "patience": count_or_none,
    "ema": either(number(0, 1, open_=True), one_of(0)),
    "checkpoint_every": count_or_none,
    "grace_period": either(none_only, integer(1, 27)),
    "reduction_factor": integer(2),
    "scaling_factor": integer(2),
    "workers": count,
    "max_workers": count_or_none,
    "lr_rule": nothing,
    "grow": nothing,
    "least_efficiency": either(number(0, 1, open_=True), one_of(0)),
    "batch_over_noise": either(positive, one_of(math.inf)),
    "strategy": nothing,
}

STEPS: dict[str, Right] = {"loader_workers": either(none_only, integer(0, 1024)), "graph": flag}
"""What each backend takes."""

LOCAL_STEPS = STEPS if torch.cuda.device_count() else STEPS | {"graph": one_of(False)}

resources: Right = lambda v: v == {"a": 1} if isinstance(v, dict) else v is None  # noqa: E731
SCHEDULER: dict[str, Right] = {
    "max_t": count,
    "grace_period": integer(1, 100),
    "reduction_factor": integer(2),
    "scaling_factor": integer(2),
    "workers": count,
    "resources_per_worker": resources,
    "max_workers": count_or_none,
    "metric": either(none_only, text),
    "mode": none_only,
    "time_attr": text,
    "patience": count,
    "wait": at_least_0,
    "grow": nothing,
}

CASES: list[tuple[Callable[[Any], object], str, Right]] = [
    *((lambda v, key=key: tuned(**{key: v}), key, right) for key, right in TUNE.items()),
    (lambda v: tuned(space={"lr": loguniform(1e-3, 1), "batch_size": v}), "space", count),
    (lambda v: tuned(space={"lr": loguniform(1e-3, 1), "x": grid_search(v)}), "space", rows_of_grid),
    (lambda v: tuned(callbacks=[v]), "callbacks", nothing),
    *((lambda v, key=key: tuned(sweep=SweepConfig(**{key: v})), f"sweep.{key}", right) for key, right in SWEEP.items()),
    *((lambda v, key=key: tuned(race=RaceConfig(**{key: v})), f"race.{key}", right) for key, right in RACE.items()),
    *((lambda v, key=key: rasda(**{key: v}), key, right) for key, right in SCHEDULER.items()),
    (lambda v: RayBackend(address=v), "address", either(none_only, text)),
    (lambda v: RayBackend(resources_per_worker=v), "resources_per_worker", resources),
    *((lambda v, key=key: RayBackend(**{key: v}), key, right) for key, right in STEPS.items()),
    *((lambda v, key=key: LocalBackend(**{key: v}), key, right) for key, right in LOCAL_STEPS.items()),
    (lambda v: LocalBackend(v), "device", none_only),
    (lambda v: LocalBackend([v]), "device", nothing),
    (lambda v: elastic(v), "train", nothing),
    (lambda v: elastic(begin, v), "scheduler", none_only),
    (lambda v: elastic(begin, FIFOScheduler(), checkpoint_every=v), "checkpoint_every", count_or_none),
    (lambda v: elastic(begin, timeout_s=v), "timeout_s", number(0, 365 * 86400, open_=True)),
    (lambda v: elastic(begin, backend=v), "backend", none_only),
    (lambda v: worker().prepare(v), "model", nothing),
    (lambda v: next(worker().batches(v, 1)), "samples", integer(1, 10**6)),
    (lambda v: next(worker().batches(4, v)), "batch_size", integer(1, 10**9)),
    (lambda v: next(worker().batches(4, 1, seed=v)), "seed", integer(0, 2**40)),
    (lambda v: next(worker().batches(4, 1, fixed_global=v)), "fixed_global", flag),
    (lambda v: worker().rescale(v), "optimizer", nothing),
    (lambda v: worker().report(v), "metrics", instance(dict)),
    (lambda v: worker().report({}, final=v), "final", flag),
    (lambda v: lr_factor(v, "linear", sgd()), "growth", at_least_0),
    (lambda v: lr_factor(2.0, v, sgd()), "rule", nothing),
    (lambda v: lr_factor(2.0, "linear", v), "optimizer", nothing),
    (lambda v: RescaledLR(sgd(), 2.0, warmup_steps=v), "warmup_steps", integer(0)),
    (lambda v: RescaledLR(sgd(), 2.0, state=v), "state", none_only),
    (load, "path", nothing),
    (read_past_run, "run", nothing),
    (lambda v: packed(jobs=v), "jobs", lambda v: isinstance(v, list | tuple | set) and not v),
    (lambda v: packed(jobs=[v]), "jobs|run", lambda v: isinstance(v, list) and v == ["a"]),
    (lambda v: packed(devices=v), "devices", none_only),
    (lambda v: packed(policy=v), "policy", none_only),
    (lambda v: packed(storage_path=v), "storage_path", folder),
    (lambda v: packed(name=v), "name", name),
    (lambda v: packed(retry_failed=v), "retry_failed", flag),
    (lambda v: packed(verbose=v), "verbose", flag),
    *(
        (lambda v, key=key: Estimate(**{key: v}), key, either(none_only, positive))
        for key in ("memory", "share", "seconds")
    ),
    (lambda v: Task(["true"], estimate=v), "estimate", nothing),
    (lambda v: Task(["true"], kind=v), "kind", instance(str)),
    (lambda v: Task(["true"], name=v), "name", either(name, one_of(""))),
    (lambda v: make_batches(v, "data", torch.device("cpu"), 0), "data", rows),
    (lambda v: simulated(plan=v), "plan", nothing),
    (lambda v: simulated(workload=v), "workload", nothing),
    (lambda v: simulated(cluster=v), "cluster", nothing),
    (lambda v: simulated(cost=v), "cost", nothing),
    (lambda v: simulated(seed=v), "seed", instance(int)),
    (lambda v: packing(policy=v), "policy", nothing),
    (lambda v: packing(jobs=v), "jobs", lambda v: isinstance(v, list | tuple) and not v),
    (lambda v: packing(jobs=[v]), "jobs", nothing),
    (lambda v: packing(machines=v), "machines", nothing),
    (lambda v: packing(interference=v), "interference", nothing),
    (lambda v: Cluster(v), "kinds", nothing),
    (lambda v: Cluster((NodeKind(1, 1),), slow_share=v), "slow_share", number(0, 1)),
    (lambda v: Cluster.uniform(v), "gpus", integer(1, 10**6)),
    (lambda v: CostModel(v, 1.0), "step_seconds", positive),
    (lambda v: CostModel(1.0, 1.0, intra=v), "intra", nothing),
    (lambda v: Link(v), "bandwidth", either(positive, one_of(float("inf")))),
    (lambda v: Workload(v, np.ones(1)), "scores|work", nothing),
    (lambda v: power_law(v, 2, 0), "trials", integer(1, 10**6)),
    (lambda v: power_law(2, v, 0), "epochs", integer(1, 10**6)),
    (lambda v: power_law(2, 2, v), "seed", integer(0)),
    (lambda v: power_law(2, 2, 0, noise=v), "noise", number(0, 100)),
    (lambda v: power_law(2, 2, 0, work_spread=v), "work_spread", number(0, 100)),
]


# The values end the process that tries them, where that is one of its own.
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("call", "argument", "right"),
    # The client of a store tries an address where nobody answers for seconds.
    [*CASES, pytest.param(read_journal, "folder", nothing, marks=pytest.mark.slow)],
)
def test_no_argument_is_taken_for_what_it_is_not(call: Callable[[Any], object], argument: str, right: Right) -> None:
    assert "\n".join(faults(call, argument, right)) == ""
