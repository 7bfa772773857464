"""RASDA's experiments as settings, and every assumption of their simulation with its origin.

The paper is Aach et al., "Resource-Adaptive Successive Doubling for Hyperparameter Optimization" (arXiv:2412.02729).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.result_files import DEFAULT_DATA
from benchmarks.transfer_tasks import existing
from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving
from hydro_rasda.simulator import (
    AnyPlan,
    Cluster,
    CostModel,
    FixedWorkers,
    Link,
    Outcome,
    Plan,
    Workload,
    power_law,
    simulate,
)
from hydro_rasda.simulator.training_time import slowest
from hydro_rasda.simulator.workload import Floats

GB = 1e9


@dataclass(frozen=True)
class Application:
    """One of the paper's applications.

    Attributes:
        max_t: Epochs of a full training. Milestones are 5, 10, 20 and so on.
        links: InfiniBand links of a node.
    """

    name: str
    trials: int
    gpus: int
    workers: int
    max_t: int
    asha_seconds: float
    rasda_seconds: float
    links: int
    steps: float
    gradient_bytes: float
    dataset_bytes: float


CV = Application("CV", 32, 64, 2, 40, 31637.0, 18502.0, 2, 1_281_167 / 128, 4 * 25.6e6, 146 * GB)
AM = Application("AM", 16, 128, 8, 20, 5784.0, 3803.0, 2, 20_000 / 8, 4 * 28.3e6, 60 * GB)
CFD = Application("CFD", 16, 128, 8, 40, 19487.0, 10242.0, 4, 20_000 / 8, 4 * 1.0e6, 4800 * GB)
APPLICATIONS = (CV, AM, CFD)


@dataclass(frozen=True)
class Assumptions:
    """Settings that the paper does not state, with one value for all applications.

    Attributes:
        serial: Share of an epoch on a new trial's workers that more workers do not shorten.
        jitter: Relative standard deviation of a worker's step time.
        epoch_noise: Standard deviation of the logarithm of an epoch's time.
        overlap: Share of a step's compute that hides the all-reduce.
        link_bandwidth: Bytes per second of one InfiniBand link.
        link_latency: Seconds.
        nvlink: Bytes per second of a GPU within its node, one direction.
        work_spread: Standard deviation of the logarithm of a trial's cost.
        curves: "lcbench" or "power law".
    """

    serial: float = 0.0
    restart_seconds: float = 60.0
    checkpoint_seconds: float = 2.0
    jitter: float = 0.02
    epoch_noise: float = 0.02
    overlap: float = 0.5
    link_bandwidth: float = 25 * GB
    link_latency: float = 5e-6
    nvlink: float = 300 * GB
    work_spread: float = 0.0
    curves: str = "lcbench"


def cost_model(app: Application, a: Assumptions) -> CostModel:
    """Return the costs of an application. Its epoch on `app.workers` GPUs takes ASHA's run time / max_t."""
    epoch = app.asha_seconds / app.max_t
    return CostModel(
        step_seconds=epoch * (1 - a.serial) * app.workers / app.steps / slowest(app.workers, a.jitter),
        steps=app.steps,
        serial_seconds=epoch * a.serial,
        gradient_bytes=app.gradient_bytes,
        intra=Link(a.nvlink, a.link_latency),
        inter=Link(a.link_bandwidth * app.links, a.link_latency),
        overlap=a.overlap,
        jitter=a.jitter,
        epoch_noise=a.epoch_noise,
        restart_seconds=a.restart_seconds,
        checkpoint_seconds=a.checkpoint_seconds,
    )


def asha(app: Application) -> AnyPlan:
    """Return the plan of the paper's baseline."""
    return Plan(FixedWorkers(AsyncSuccessiveHalving(app.max_t, 5, 2), app.workers))


def rasda(app: Application, grace: int = 5) -> AnyPlan:
    """Return the plan of the paper's algorithm, in which no trial gets more GPUs than there are."""
    return Plan(RASDA(app.max_t, grace, 2, 2, app.workers, app.gpus))


def cluster(app: Application) -> Cluster:
    """Return a cluster of nodes with four GPUs each."""
    return Cluster.uniform(app.gpus, 4)


@cache
def curves(kind: str, trials: int, epochs: int, seed: int, work_spread: float = 0.0) -> Workload:
    """Return learning curves. Each seed has its own configurations and, with LCBench, its own task."""
    parametric = power_law(trials, epochs, seed, work_spread=work_spread)
    if kind == "power law":
        return parametric
    tasks = lcbench_tasks()
    table = lcbench(tasks[seed % len(tasks)], trials, seed)
    return Workload(table.scores[:, :epochs], parametric.work, table.mode)


def run(app: Application, plan: AnyPlan, a: Assumptions, seeds: Iterable[int]) -> list[Outcome]:
    """Simulate a plan once for each seed."""
    cost, machine = cost_model(app, a), cluster(app)
    workloads = {seed: curves(a.curves, app.trials, app.max_t, seed, a.work_spread) for seed in seeds}
    return [simulate(plan, workload, machine, cost, seed) for seed, workload in workloads.items()]


def seconds(outcomes: Iterable[Outcome]) -> float:
    """Return the mean run time, as in the paper's tables."""
    return mean(o.seconds for o in outcomes)


LCBENCH = Path(DEFAULT_DATA) / "lcbench"
EPOCHS = 52
_TIME, _VAL_CROSS_ENTROPY = 0, 2
_INPUTS = ("epoch", "batch_size", "learning_rate", "momentum", "weight_decay", "num_layers", "max_units", "max_dropout")


def lcbench_tasks() -> tuple[str, ...]:
    """Return the OpenML task ids of LCBench's 34 data sets."""
    return tuple(_space()["OpenML_task_id"]["choices"])


def lcbench(task: str, trials: int, seed: int) -> Workload:
    """Return the validation cross-entropy of random configurations of LCBench's own space over 52 epochs.

    Zimmer et al., "Auto-PyTorch Tabular" (2021), trained 2,000 configurations of a funnel-shaped MLP on each of 34 data
    sets. Pfisterer et al., "YAHPO Gym" (2022), fitted a network to their curves and wall times. It is an ONNX model.

    Args:
        task: OpenML task id, such as "3945".

    Returns:
        Curves [N, 52], to be minimized; `work` is the mean seconds of an epoch over those of the median trial.
    """
    import onnxruntime

    space, rng = _space(), np.random.default_rng(seed)
    configs = {name: _sample(space[name], trials, rng) for name in _INPUTS if name != "epoch"}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = str(existing(LCBENCH / "model.onnx"))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    epochs = np.tile(np.arange(1, EPOCHS + 1), trials)
    columns = [epochs if name == "epoch" else np.repeat(configs[name], EPOCHS) for name in _INPUTS]
    code = json.loads(existing(LCBENCH / "encoding.json").read_text())["OpenML_task_id"][task]
    inputs = {
        "x_cat": np.full((trials * EPOCHS, 1), code, dtype=np.int32),
        "x_cont": np.stack(columns, axis=1).astype(np.float32),
    }
    outputs = np.asarray(session.run(None, inputs)[0], dtype=np.float64).reshape(trials, EPOCHS, -1)
    seconds = np.maximum(outputs[:, -1, _TIME], 1e-3) / EPOCHS
    return Workload(outputs[:, :, _VAL_CROSS_ENTROPY], seconds / np.median(seconds), "min")


def _space() -> dict[str, dict[str, Any]]:
    text = existing(LCBENCH / "config_space.json").read_text()
    return {h["name"]: h for h in json.loads(text)["hyperparameters"]}


def _sample(domain: dict[str, Any], trials: int, rng: np.random.Generator) -> Floats:
    low, high = domain["lower"], domain["upper"]
    if domain["log"]:
        values: Floats = np.exp(rng.uniform(np.log(low), np.log(high), trials))
    else:
        values = rng.uniform(low, high, trials)
    return values.round() if domain["type"] == "uniform_int" else values
