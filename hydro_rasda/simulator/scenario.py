"""The scenario of a forecast: trials, rules and cluster. Most values that are None are taken from the past run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hydro_rasda.common.argument_checks import check_int, check_is, check_number, is_number, require
from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving
from hydro_rasda.simulator.cluster import Cluster
from hydro_rasda.simulator.past_run import PastRun
from hydro_rasda.simulator.rules import AnyPlan, FixedWorkers, Plan, random_search, synchronous_halving
from hydro_rasda.simulator.training_time import CostModel, Link

GIGA, HOUR = 1e9, 3600.0

RULES: Mapping[str, str] = {
    "random": "random search",
    "synchronous": "synchronous halving",
    "asha": "ASHA",
    "rasda": "RASDA as published",
    "waiting": "RASDA, waiting",
    "efficient": "RASDA, efficient growth",
    "both": "RASDA, both",
}
"""Rules that can be compared, with their names for people. "waiting" sets `wait`, "efficient" sets `grow="efficient"`,
and "both" sets both."""

RESTART_SECONDS = 30.0
"""Seconds of a restart, if neither the scenario nor the past run has them."""

MOST_SECONDS = 1e9
"""Most seconds of an epoch or a restart: 32 years. A larger value is a mistake, and sums would overflow."""

_LEAST = {
    **dict.fromkeys(("trials", "max_t", "grace_period", "workers", "max_workers", "seeds"), 1),
    **dict.fromkeys(("gpus", "gpus_per_node", "parameters"), 1),
    **dict.fromkeys(("reduction_factor", "scaling_factor"), 2),
}
_MOST: Mapping[str, float] = {
    **dict.fromkeys(("epoch_seconds", "restart_seconds", "launch_seconds"), MOST_SECONDS),
    **{"trials": 1e6, "gpus": 1e7, "steps": 1e12, "parameters": 1e15},
}
_ABOVE_ZERO = ("speed", "epoch_seconds", "steps", "intra_bandwidth", "inter_bandwidth", "mtbf_hours")
_NOT_BELOW_ZERO = ("restart_seconds", "launch_seconds", "wait")


@dataclass(frozen=True)
class Scenario:
    """A cluster and a search to simulate. Arguments that are None are taken from the past run, unless stated otherwise.

    Attributes:
        rules: Names in `RULES`.
        trials: Number of configurations to try; None for the number in the past run. A larger number repeats the run's
            curves.
        max_t: Epochs of a full training.
        grace_period: Epochs before the first decision; None for the past run's, or else a quarter of `max_t`.
        reduction_factor: The paper's rf; None for the past run's, or else 2.
        scaling_factor: The paper's sf; None for the past run's, or else 2.
        workers: GPUs of a new trial.
        max_workers: Most GPUs of a trial; None for all.
        wait: Longest wait of a trial at a milestone, relative to its time to get there, under the rules that wait.
        seeds: Number of simulations, of which the median is taken.
        speed: Speed of a GPU, relative to the past run's device.
        epoch_seconds: Seconds of an epoch of the full-size model on one GPU; it replaces `speed`. None for the past
            run's time, divided by `speed`.
        steps: Steps of an epoch on one GPU; None to compute them from the past run's data.
        parameters: Parameters of the full-size model; None for the past run's. If unknown, gradients cost nothing.
        serial: Share of an epoch that more GPUs do not shorten.
        intra_bandwidth: GB/s of a GPU within its node.
        inter_bandwidth: GB/s of a node.
        jitter: Relative standard deviation of step times.
        restart_seconds: Seconds from the grant of GPUs to the first step; None for the time that the past run's resizes
            took, or for 30 if it had none.
        launch_seconds: Seconds that the head node takes to start one process; it starts them in turn.
        mtbf_hours: Mean hours between failures of a node; None for no failures.
    """

    gpus: int
    gpus_per_node: int = 4
    rules: tuple[str, ...] = tuple(RULES)
    trials: int | None = None
    max_t: int | None = None
    grace_period: int | None = None
    reduction_factor: int | None = None
    scaling_factor: int | None = None
    workers: int = 1
    max_workers: int | None = None
    wait: float = 0.1
    seeds: int = 5
    speed: float = 1.0
    epoch_seconds: float | None = None
    steps: float | None = None
    parameters: int | None = None
    serial: float = 0.1
    intra_bandwidth: float = 300.0
    inter_bandwidth: float = 25.0
    jitter: float = 0.02
    restart_seconds: float | None = None
    launch_seconds: float = 0.0
    mtbf_hours: float | None = None


def check(scenario: Scenario, run: PastRun) -> None:
    """Raise ValueError for values that are out of range or do not fit the past run."""
    check_is("run", run, PastRun)
    check_is("scenario", scenario, Scenario)
    given = {field.name: value for field in fields(scenario) if (value := getattr(scenario, field.name)) is not None}
    for argument, least in _LEAST.items():
        if argument in given:
            check_int(argument, given[argument], least)
    for argument in (*_ABOVE_ZERO, *_NOT_BELOW_ZERO):
        if argument in given:
            check_number(argument, given[argument], above=0.0 if argument in _ABOVE_ZERO else None)
    for argument, most in _MOST.items():
        require(given.get(argument, 0) <= most, argument, given.get(argument), f"<= {most:g}")
    require(bool(scenario.rules), "rules", scenario.rules, f"one or more of {[*RULES]}")
    for rule in scenario.rules:
        require(rule in RULES, "rules", rule, f"one of {[*RULES]}")
    serial, jitter = scenario.serial, scenario.jitter
    require(is_number(serial) and 0 <= serial < 1, "serial", serial, ">= 0 and < 1")
    require(is_number(jitter) and 0 <= jitter <= 1, "jitter", jitter, ">= 0 and <= 1")
    gpus = f"<= `gpus` ({scenario.gpus})"
    require(scenario.workers <= scenario.gpus, "workers", scenario.workers, gpus)
    most_workers = given.get("max_workers", scenario.workers)
    at_least = f">= `workers` ({scenario.workers})"
    require(most_workers >= scenario.workers, "max_workers", most_workers, at_least)
    max_t, grace, _, _ = _halving(scenario, run)
    epochs = run.workload.epochs
    require(max_t <= epochs, "max_t", max_t, f"<= the past run's {epochs} epochs")
    require(grace <= max_t, "grace_period", grace, f"<= `max_t` ({max_t})")
    _check_costs(scenario, run)


def _check_costs(scenario: Scenario, run: PastRun) -> None:
    if run.epoch_seconds is None:
        why = "given: the run has timed no full-size epoch"
        require(scenario.epoch_seconds is not None, "epoch_seconds", scenario.epoch_seconds, why)
    if _steps(scenario, run) is None:
        raise ValueError("`steps` is None, but must be given: the run does not tell how much data it had")
    seconds = epoch_seconds(scenario, run)
    require(seconds <= MOST_SECONDS, "speed", scenario.speed, f"such that an epoch takes <= {MOST_SECONDS:g} s")
    for argument in ("intra_bandwidth", "inter_bandwidth"):
        slow = (
            cost_model(scenario, run).gradient_bytes
            / (getattr(scenario, argument) * GIGA)
            * (_steps(scenario, run) or 1.0)
        )
        rule = f"such that an epoch's gradients take <= {MOST_SECONDS:g} s"
        require(slow <= MOST_SECONDS, argument, getattr(scenario, argument), rule)


def plans(scenario: Scenario, run: PastRun) -> dict[str, AnyPlan]:
    """Return the plans to compare, by the name of the rule. Values that are None are taken from the past run."""
    max_t, grace, rf, sf = _halving(scenario, run)
    workers, mode = scenario.workers, run.workload.mode
    rasda = RASDA(max_t, grace, rf, sf, workers, scenario.max_workers, mode=mode)
    every: dict[str, Callable[[], AnyPlan]] = {
        "random": lambda: Plan(random_search(max_t, workers, mode)),
        "synchronous": lambda: Plan(synchronous_halving(max_t, grace, rf, workers, mode)),
        "asha": lambda: Plan(FixedWorkers(AsyncSuccessiveHalving(max_t, grace, rf, mode=mode), workers)),
        "rasda": lambda: Plan(rasda),
        "waiting": lambda: Plan(replace(rasda, wait=scenario.wait)),
        "efficient": lambda: Plan(replace(rasda, grow="efficient")),
        "both": lambda: Plan(replace(rasda, wait=scenario.wait, grow="efficient")),
    }
    return {name: make() for name, make in every.items() if name in scenario.rules}


def _halving(scenario: Scenario, run: PastRun) -> tuple[int, int, int, int]:
    """Return the epochs of a full training, the first milestone, rf and sf."""
    before = run.settings.get("rasda", {})
    max_t = _first(scenario.max_t, run.settings.get("max_t"), run.workload.epochs)
    grace = _first(scenario.grace_period, before.get("grace_period"), max(1, max_t // 4))
    rf = _first(scenario.reduction_factor, before.get("reduction_factor"), 2)
    return max_t, grace, rf, _first(scenario.scaling_factor, before.get("scaling_factor"), 2)


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def epoch_seconds(scenario: Scenario, run: PastRun) -> float:
    """Return the seconds of a full-size epoch on one GPU."""
    if scenario.epoch_seconds is not None:
        return scenario.epoch_seconds
    return (run.epoch_seconds or 0.0) / scenario.speed


def _steps(scenario: Scenario, run: PastRun) -> float | None:
    # If there are no gradients to average, the number of steps does not matter. So 1 replaces an unknown number.
    sizeless = scenario.parameters is None and not run.gradient_bytes
    steps: float | None = _first(scenario.steps, run.steps, 1.0 if sizeless else None)
    return steps


def cost_model(scenario: Scenario, run: PastRun) -> CostModel:
    """Return a cost model with the past run's epoch time and model size, and with the scenario's network links."""
    seconds, steps = epoch_seconds(scenario, run), _steps(scenario, run) or 1.0
    return CostModel(
        step_seconds=seconds * (1 - scenario.serial) / steps,
        steps=steps,
        serial_seconds=seconds * scenario.serial,
        gradient_bytes=run.gradient_bytes if scenario.parameters is None else 4.0 * scenario.parameters,
        intra=Link(scenario.intra_bandwidth * GIGA, 5e-6),
        inter=Link(scenario.inter_bandwidth * GIGA, 5e-6),
        jitter=scenario.jitter,
        epoch_noise=scenario.jitter,
        restart_seconds=_first(scenario.restart_seconds, run.restart_seconds, RESTART_SECONDS),
    )


def cluster(scenario: Scenario) -> Cluster:
    """Return a cluster with the scenario's GPUs, mean time between failures, and time to start a process."""
    mtbf = math.inf if scenario.mtbf_hours is None else scenario.mtbf_hours * HOUR
    whole = Cluster.uniform(scenario.gpus, scenario.gpus_per_node)
    return replace(whole, mtbf=mtbf, launch_seconds=scenario.launch_seconds)
