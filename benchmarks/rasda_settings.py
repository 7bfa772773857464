"""RASDA's experiments as settings, and every assumption of their simulation with its origin.

The paper is Aach et al., "Resource-Adaptive Successive Doubling for Hyperparameter Optimization" (arXiv:2412.02729).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

from benchmarks.lcbench import lcbench, lcbench_tasks
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
from hydro_rasda.simulator.cost import slowest

GB = 1e9


@dataclass(frozen=True)
class Application:
    """One of the paper's applications.

    Attributes:
        max_t: Epochs; milestones double from 5.
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
    """What the paper does not say; one value for all applications.

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


ORIGINS: tuple[tuple[str, str, str], ...] = (
    ("trials, GPUs, GPUs of a new trial, milestones, rf = sf = 2", "see the tables", "paper, secs. 4 and 5.3, fig. 7"),
    (
        "epoch on a new trial's GPUs",
        "ASHA's run time / max_t: 791 s (CV), 289 s (AM), 487 s (CFD)",
        "paper, tables 2-4 (ASHA's column alone; RASDA's is predicted)",
    ),
    ("GPUs of a node", "4", "paper, sec. 5.1"),
    ("InfiniBand links of a node", "2 (JURECA: CV, AM), 4 (JUWELS Booster: CFD, fig. 4)", "paper, sec. 5.1"),
    ("bandwidth of a link", "25 GB/s", "datasheet: HDR InfiniBand, 200 Gbit/s"),
    ("bandwidth of a GPU in its node", "300 GB/s in each direction", "datasheet: A100, NVLink 3"),
    ("latency of a message", "5 us", "assumed; see the sensitivities"),
    ("CV: samples, local batch", "1,281,167 and 128", "paper, secs. 4.1 and 5.3 (256 on 2 GPUs)"),
    ("CV: parameters", "25.6 million, float32", "ResNet-50, He et al. (2016)"),
    ("AM: parameters", "28.3 million, float32", "Swin-T, Liu et al. (2021); the paper varies the size"),
    ("AM, CFD: samples", "20,000", "assumed (the paper gives bytes); sets the number of all-reduces"),
    ("AM, CFD: local batch", "8", "paper, sec. 5.3 for AM (64 on 8 GPUs); assumed for CFD"),
    ("CFD: parameters", "1 million, float32", "assumed: an autoencoder of 8 convolutions"),
    ("CFD: training data", "4.8 TB", "paper, sec. 4.3"),
    ("restart", "60 s from the grant of GPUs to the first step", "assumed; see the sensitivities"),
    ("checkpoint", "2 s, at milestones", "assumed; the paper checkpoints every 5 epochs"),
    ("jitter of a step, noise of an epoch", "2 %, 2 %", "assumed; see the sensitivities"),
    ("overlap of all-reduce and compute", "half of the compute", "assumed; DDP overlaps with the backward pass"),
    ("cost of a trial", "the same for all", "assumed; see the sensitivities (AM and CFD vary the model's size)"),
    (
        "learning curves",
        "validation cross-entropy of LCBench, a task a seed, all 34 by turns",
        "YAHPO Gym; the paper's own curves are not public. They decide who survives, not what an epoch takes",
    ),
    (
        "serial share of an epoch",
        "one number for all applications, see above",
        "fitted to the three ratios together: validation, data loader, everything else that does not scale",
    ),
    (
        "placement",
        "this library's: deepest rung first, reservation, backfill",
        "the paper's Ray 2.8 ResourceChangingScheduler is not modelled",
    ),
)


def cost_model(app: Application, a: Assumptions) -> CostModel:
    """An application under assumptions; its epoch on `app.workers` GPUs takes ASHA's run time / max_t."""
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


def asha(app: Application, grace: int = 5, rf: int = 2) -> AnyPlan:
    """The paper's baseline."""
    return Plan(FixedWorkers(AsyncSuccessiveHalving(app.max_t, min(grace, app.max_t), rf), app.workers))


def rasda(app: Application, grace: int = 5, rf: int = 2, sf: int = 2) -> AnyPlan:
    """The paper's algorithm; no trial gets more GPUs than there are."""
    return Plan(RASDA(app.max_t, min(grace, app.max_t), rf, sf, app.workers, max(app.gpus, app.workers)))


def scaled(app: Application, gpus: int, trials: int | None = None, max_t: int | None = None) -> Application:
    """The same application, epoch for epoch, in a run of another size."""
    epochs = max_t or app.max_t
    return replace(
        app,
        gpus=gpus,
        trials=trials or app.trials * gpus // app.gpus,
        max_t=epochs,
        asha_seconds=app.asha_seconds / app.max_t * epochs,
    )


def cluster(app: Application) -> Cluster:
    """Nodes of four GPUs."""
    return Cluster.uniform(app.gpus, 4)


@cache
def curves(kind: str, trials: int, epochs: int, seed: int, work_spread: float = 0.0) -> Workload:
    """Learning curves; each seed has its own configurations, and of LCBench its own task."""
    parametric = power_law(trials, epochs, seed, work_spread=work_spread)
    if kind == "power law":
        return parametric
    tasks = lcbench_tasks()
    table = lcbench(tasks[seed % len(tasks)], trials, seed)
    return Workload(table.scores[:, :epochs], parametric.work, table.mode)


def run(
    app: Application, plan: AnyPlan, a: Assumptions, seeds: Iterable[int], machine: Cluster | None = None
) -> list[Outcome]:
    """One outcome a seed."""
    cost = cost_model(app, a)
    where = machine or cluster(app)
    return [
        simulate(plan, curves(a.curves, app.trials, app.max_t, seed, a.work_spread), where, cost, seed)
        for seed in seeds
    ]


def seconds(outcomes: Iterable[Outcome]) -> float:
    """Mean run time, as in the paper's tables."""
    return mean(o.seconds for o in outcomes)
