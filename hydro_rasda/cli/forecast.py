"""`simulate`: how long would a search like a past run take on N GPUs, in GPU hours?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from hydro_rasda.checks import check_int, check_number, require
from hydro_rasda.cli.output import print_json
from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving
from hydro_rasda.simulator import (
    AnyPlan,
    Cluster,
    CostModel,
    FixedWorkers,
    Link,
    Outcome,
    PastRun,
    Plan,
    read_past_run,
    simulate,
)

GIGA = 1e9
HOUR = 3600.0

_LEAST = {
    "trials": 1,
    "max_t": 1,
    "grace_period": 1,
    "reduction_factor": 2,
    "scaling_factor": 2,
    "workers": 1,
    "max_workers": 1,
    "seeds": 1,
    "gpus": 1,
    "gpus_per_node": 1,
}
_ABOVE_ZERO = ("speed", "epoch_seconds", "steps", "intra_bandwidth", "inter_bandwidth", "mtbf_hours")
_FINITE = ("speed", "epoch_seconds", "steps", "restart_seconds")


@dataclass(frozen=True)
class Forecast:
    """What a search would take under one scheduler: medians over seeds, and the range of the time.

    Attributes:
        scheduler: "ASHA" or "RASDA".
        hours: Time until the last trial ends.
        hours_range: The shortest and the longest such time.
        gpu_hours: GPU time of all trials.
        reserved_gpu_hours: GPU time of the whole cluster from start to end, as a batch system would charge it.
        utilization: `gpu_hours` over `reserved_gpu_hours`.
        epochs: Epochs trained by all trials.
        finished: Number of trials that reached `max_t`.
    """

    scheduler: str
    hours: float
    hours_range: tuple[float, float]
    gpu_hours: float
    reserved_gpu_hours: float
    utilization: float
    epochs: float
    finished: float


@dataclass(frozen=True)
class Options:
    """What the command line says; where it says nothing of the study, that is as in the past run.

    Attributes:
        run: Folder of a past run.
        gpus: GPUs of the cluster.
        gpus_per_node: GPUs of a node.
        scheduler: "asha", "rasda" or "both".
        trials: Configurations to try; those of the run, repeated where it has less.
        max_t: Epochs of a full training.
        grace_period: Epochs before the first decision.
        reduction_factor: The paper's rf.
        scaling_factor: The paper's sf.
        workers: GPUs of a new trial.
        max_workers: Most GPUs of a trial; None: all.
        seeds: Simulations to take the median of.
        speed: Of a GPU over the device of the past run.
        epoch_seconds: Of the full-size model on one GPU, in place of `speed`.
        steps: Steps of an epoch on one GPU; None: from the run's data.
        serial: Share of that epoch that more GPUs do not shorten.
        intra_bandwidth: GB/s of a GPU within its node.
        inter_bandwidth: GB/s of a node.
        jitter: Relative standard deviation of step times.
        restart_seconds: From the grant of GPUs to the first step.
        mtbf_hours: Mean time between failures of a node; None: never.
    """

    run: str
    gpus: int
    gpus_per_node: int = 4
    scheduler: str = "both"
    trials: int | None = None
    max_t: int | None = None
    grace_period: int | None = None
    reduction_factor: int | None = None
    scaling_factor: int | None = None
    workers: int = 1
    max_workers: int | None = None
    seeds: int = 5
    speed: float = 1.0
    epoch_seconds: float | None = None
    steps: float | None = None
    serial: float = 0.1
    intra_bandwidth: float = 300.0
    inter_bandwidth: float = 25.0
    jitter: float = 0.02
    restart_seconds: float = 30.0
    mtbf_hours: float | None = None


def print_forecasts(options: Options, as_json: bool) -> None:
    """Print what the schedulers would take.

    Raises:
        ValueError: where an option is out of range, or does not fit the past run.
        FileNotFoundError: where the folder holds no run.
    """
    check(options)
    run = read_past_run(options.run)
    forecasts = [forecast(name, plan, run, options) for name, plan in plans(run, options).items()]
    if as_json:
        print_json([asdict(f) for f in forecasts])
    else:
        print(table(run, options, forecasts))


def check(options: Options) -> None:
    """Refuses what is out of range, by the name under which it was given.

    Raises:
        ValueError: where an option is.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}
    for name, least in _LEAST.items():
        if name in given:
            check_int(_flag(name), given[name], least)
    for name in (*_ABOVE_ZERO, "restart_seconds"):
        if name in given:
            check_number(_flag(name), given[name], above=0.0 if name in _ABOVE_ZERO else None)
            require(name not in _FINITE or math.isfinite(given[name]), _flag(name), given[name], "finite")
    require(0 <= options.serial < 1, "--serial", options.serial, ">= 0 and < 1")
    require(0 <= options.jitter <= 1, "--jitter", options.jitter, ">= 0 and <= 1")
    require(options.workers <= options.gpus, "--workers", options.workers, f"<= `--gpus` ({options.gpus})")
    most = given.get("max_workers", options.workers)
    require(most >= options.workers, "--max-workers", most, f">= `--workers` ({options.workers})")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def plans(run: PastRun, options: Options) -> dict[str, AnyPlan]:
    """The schedulers to compare; what the command line leaves open is as in the past run.

    Raises:
        ValueError: where there are more epochs than in the past run, or the first decision comes after the last epoch.
    """
    before = run.settings["rasda"]
    max_t = _given(options.max_t, int(run.settings["max_t"]))
    require(max_t <= run.workload.epochs, "--max-t", max_t, f"<= the past run's {run.workload.epochs} epochs")
    grace = _given(options.grace_period, _given(before["grace_period"], max(1, max_t // 4)))
    require(grace <= max_t, "--grace-period", grace, f"<= `--max-t` ({max_t})")
    rf = _given(options.reduction_factor, int(before["reduction_factor"]))
    sf = _given(options.scaling_factor, int(before["scaling_factor"]))
    mode = run.workload.mode
    both: dict[str, AnyPlan] = {
        "ASHA": Plan(FixedWorkers(AsyncSuccessiveHalving(max_t, grace, rf, mode), options.workers)),
        "RASDA": Plan(RASDA(max_t, grace, rf, sf, options.workers, options.max_workers, mode)),
    }
    return both if options.scheduler == "both" else {options.scheduler.upper(): both[options.scheduler.upper()]}


def _given(option: int | None, otherwise: int) -> int:
    return otherwise if option is None else option


def cost_model(run: PastRun, options: Options) -> CostModel:
    """The past run's own epoch time and model size, on the links that the command line names.

    Raises:
        ValueError: where neither the run nor the command line tells the epoch time, or the steps of an epoch.
    """
    seconds = options.epoch_seconds
    if seconds is None and run.epoch_seconds is not None:
        seconds = run.epoch_seconds / options.speed
    if seconds is None:
        raise ValueError("`--epoch-seconds` is None, but must be given: the run has trained no full-size epoch")
    steps = run.steps if options.steps is None else options.steps
    if steps is None:
        raise ValueError("`--steps` is None, but must be given: the run does not tell how much data it had")
    return CostModel(
        step_seconds=seconds * (1 - options.serial) / steps,
        steps=steps,
        serial_seconds=seconds * options.serial,
        gradient_bytes=run.gradient_bytes,
        intra=Link(options.intra_bandwidth * GIGA, 5e-6),
        inter=Link(options.inter_bandwidth * GIGA, 5e-6),
        jitter=options.jitter,
        epoch_noise=options.jitter,
        restart_seconds=options.restart_seconds,
    )


def forecast(name: str, plan: AnyPlan, run: PastRun, options: Options) -> Forecast:
    """Simulates one scheduler for each seed.

    Raises:
        ValueError: where nodes fail so often that a trial never gets on.
    """
    cost = cost_model(run, options)
    cluster = Cluster.uniform(options.gpus, options.gpus_per_node)
    if options.mtbf_hours is not None:
        cluster = replace(cluster, mtbf=options.mtbf_hours * HOUR)
    trials = run.workload.trials if options.trials is None else options.trials
    try:
        outcomes = [simulate(plan, run.workload.resampled(trials, s), cluster, cost, s) for s in range(options.seeds)]
    except RuntimeError as error:
        raise ValueError(f"`--mtbf-hours` is {options.mtbf_hours}, but must be longer: {error}") from error
    return summary(name, outcomes)


def summary(name: str, outcomes: Sequence[Outcome]) -> Forecast:
    """Medians over outcomes."""
    hours = [o.seconds / HOUR for o in outcomes]
    return Forecast(
        scheduler=name,
        hours=median(hours),
        hours_range=(min(hours), max(hours)),
        gpu_hours=median(o.gpu_seconds for o in outcomes) / HOUR,
        reserved_gpu_hours=median(hours) * outcomes[0].gpus,
        utilization=median(o.utilization for o in outcomes),
        epochs=median(o.epochs for o in outcomes),
        finished=median(len(o.finished) for o in outcomes),
    )


def table(run: PastRun, options: Options, forecasts: Sequence[Forecast]) -> str:
    """The forecasts for people, and what they rest on."""
    cost = cost_model(run, options)
    trials = run.workload.trials if options.trials is None else options.trials
    lines = [
        f"{trials} trials on {options.gpus} GPUs, {options.workers} for a new trial, {options.seeds} seeds",
        f"one epoch on one GPU {cost.steps * cost.step_seconds + cost.serial_seconds:.3g} s "
        f"({options.serial:.0%} of it serial), {run.parameters:,} parameters, restart {options.restart_seconds:g} s",
        "",
        f"{'':6} {'hours':>10} {'range':>19} {'GPU hours':>10} {'reserved':>10} {'used':>6} {'epochs':>8} {'full':>5}",
    ]
    for f in forecasts:
        spread = f"{f.hours_range[0]:.3g} - {f.hours_range[1]:.3g}"
        lines.append(
            f"{f.scheduler:6} {f.hours:10.3g} {spread:>19} {f.gpu_hours:10.3g} {f.reserved_gpu_hours:10.3g} "
            f"{f.utilization:6.0%} {f.epochs:8.0f} {f.finished:5.0f}"
        )
    lines.append("\nreserved: all GPUs from start to end; used: share of it that trials held; full: trials at max_t")
    return "\n".join(lines)
