"""Forecast the time, the GPU hours and the result of a scenario under each rule, and recommend a size and a rule."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean, median

from hydro_rasda.common.argument_checks import check_is, check_number, require
from hydro_rasda.schedulers import RASDA
from hydro_rasda.schedulers.milestones import first_look
from hydro_rasda.simulator.cluster import Cluster
from hydro_rasda.simulator.engine import Simulation
from hydro_rasda.simulator.outcome import Outcome, Spending, spending
from hydro_rasda.simulator.past_run import PastRun
from hydro_rasda.simulator.rules import AnyPlan, Plan
from hydro_rasda.simulator.scenario import HOUR, RULES, Scenario, check, cluster, cost_model, epoch_seconds, plans
from hydro_rasda.simulator.training_time import CostModel
from hydro_rasda.simulator.workload import Workload


def simulate(plan: AnyPlan, workload: Workload, cluster: Cluster, cost: CostModel, seed: int = 0) -> Outcome:
    """Simulate a search over all trials of a workload.

    Args:
        workload: The trials. They start in the order of the table, each as soon as enough workers are free.
        cost: The time that epochs, restarts and checkpoints take.
        seed: Determines epoch noise, slow nodes and failures. The same arguments give the same outcome.

    Raises:
        ValueError: if the curves are shorter than `max_t`, the rule's mode differs from the workload's, a new trial
            needs more workers than there are, or `plan.resize` returns less than 1.
        RuntimeError: if node failures hit one trial too often.

    >>> from hydro_rasda.simulator import FixedWorkers, Plan, power_law
    >>> from hydro_rasda.schedulers import AsyncSuccessiveHalving
    >>> plan = Plan(FixedWorkers(AsyncSuccessiveHalving(max_t=9, reduction_factor=3), workers=2))
    >>> cost = CostModel(step_seconds=1.0, steps=10)
    >>> simulate(plan, power_law(trials=1, epochs=9, seed=0), Cluster.uniform(4), cost).seconds
    45.0
    """
    check_is("workload", workload, Workload)
    check_is("cluster", cluster, Cluster)
    check_is("cost", cost, CostModel)
    check_is("plan", plan, Plan)
    check_is("seed", seed, int)
    if workload.epochs < plan.rule.max_t:
        raise ValueError(f"`workload` has {workload.epochs} epochs, but must have >= max_t ({plan.rule.max_t})")
    if workload.mode != plan.rule.mode:
        raise ValueError(f"`plan` has mode {plan.rule.mode!r}, but must have that of `workload`, {workload.mode!r}")
    require(plan.rule.workers <= cluster.gpus, "workers", plan.rule.workers, f"<= the cluster's {cluster.gpus} GPUs")
    with _no_collector():
        return Simulation(plan, workload, cluster, cost, seed).run()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Switch the garbage collector off: it would visit many objects, but a simulation makes no cycles to collect."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


TUNE = "tune"
"""Stands in place of a rule's name for `tune(backend="ray")`, which trains surrogates first."""

TOLERANCE = 0.05
"""Largest `Forecast.relative_regret` of a recommended rule."""

MOST_TRIED = 3
"""Most seeds that `recommend` tries for each size and rule."""


@dataclass(frozen=True)
class Forecast:
    """The forecast of a search under one rule: medians over seeds, and the range of the time.

    Attributes:
        rule: A name in `RULES`, or "tune".
        name: Name of the rule, for people.
        workers: GPUs of a new trial.
        hours: Time until the last trial ends.
        hours_range: The shortest and the longest such time.
        gpu_hours: GPU time of all trials.
        reserved_gpu_hours: GPU time of the whole cluster from start to end. A batch system would charge this time.
        utilization: `gpu_hours` over `reserved_gpu_hours`.
        epochs: Epochs trained by all trials; for "tune", only those at full size.
        finished: Number of trials that reached `max_t`.
        regret: Difference between the winner's last score and the score that the best trial would have reached,
            averaged over seeds. NaN for "tune", because scores of surrogates do not tell it.
        relative_regret: `regret`, divided by the mean difference between the best and the median trial's last score.
        spending: Use of the GPU time, in GPU hours, averaged over seeds; for "tune", only that of the race.
        sweep_hours: The part of `hours` that surrogates take; 0 for rules other than "tune".
    """

    rule: str
    name: str
    gpus: int
    workers: int
    hours: float
    hours_range: tuple[float, float]
    gpu_hours: float
    reserved_gpu_hours: float
    utilization: float
    epochs: float
    finished: float
    regret: float
    relative_regret: float
    spending: Spending
    sweep_hours: float = 0.0


def forecast(run: PastRun, scenario: Scenario) -> list[Forecast]:
    """Simulate each rule for each seed; the fastest rule comes first. Add `tune()` if the past run had surrogates.

    Raises:
        ValueError: if an argument of the scenario is out of range or does not fit the past run, or if nodes fail so
            often that a trial makes no progress.
    """
    check(scenario, run)
    found = [_forecast(name, plan, run, scenario) for name, plan in plans(scenario, run).items()]
    found.sort(key=lambda each: each.hours)
    return [*found, *forecast_tune(run, scenario)]


def _forecast(rule: str, plan: AnyPlan, run: PastRun, scenario: Scenario) -> Forecast:
    trials = run.workload.trials if scenario.trials is None else scenario.trials
    workloads = [run.workload.resampled(trials, seed) for seed in range(scenario.seeds)]
    outcomes = _simulated(plan, workloads, run, scenario)
    regrets, spreads = zip(*(_regret(o, w) for o, w in zip(outcomes, workloads)))
    found = _summary(rule, RULES[rule], outcomes, run, scenario)
    spread = mean(spreads)
    relative = mean(regrets) / spread if spread else 0.0
    return replace(found, regret=mean(regrets), relative_regret=relative)


def _simulated(plan: AnyPlan, workloads: Iterable[Workload], run: PastRun, scenario: Scenario) -> list[Outcome]:
    machine, cost = cluster(scenario), cost_model(scenario, run)
    try:
        return [simulate(plan, workload, machine, cost, seed) for seed, workload in enumerate(workloads)]
    except RuntimeError as error:
        raise ValueError(f"`mtbf_hours` is {scenario.mtbf_hours}, but must be longer: {error}") from error


def _regret(outcome: Outcome, workload: Workload) -> tuple[float, float]:
    """Return two differences to the best last score: of the winner's last score, and of the median last score."""
    last = sorted(score for score in workload.scores[:, outcome.max_t - 1].tolist() if math.isfinite(score))
    if not last or not math.isfinite(outcome.best_score):
        return 0.0, 0.0
    best = last[0] if workload.mode == "min" else last[-1]
    return abs(outcome.best_score - best), abs(median(last) - best)


def _summary(rule: str, name: str, outcomes: Sequence[Outcome], run: PastRun, scenario: Scenario) -> Forecast:
    hours = [o.seconds / HOUR for o in outcomes]
    cost = cost_model(scenario, run)
    spent = [spending(o, cost, scenario.workers, scenario.gpus_per_node) for o in outcomes]
    return Forecast(
        rule=rule,
        name=name,
        gpus=scenario.gpus,
        workers=scenario.workers,
        hours=median(hours),
        hours_range=(min(hours), max(hours)),
        gpu_hours=median(o.gpu_seconds for o in outcomes) / HOUR,
        reserved_gpu_hours=median(hours) * scenario.gpus,
        utilization=median(o.utilization for o in outcomes),
        epochs=median(o.epochs for o in outcomes),
        finished=median(len(o.finished) for o in outcomes),
        regret=math.nan,
        relative_regret=math.nan,
        spending=Spending(*(mean(column) / HOUR for column in zip(*spent))),
    )


def forecast_tune(run: PastRun, scenario: Scenario) -> list[Forecast]:
    """Forecast `tune(backend="ray")`: the sweep on surrogates, then the finalists under the run's own RASDA.

    A group of surrogates takes as long as in the past run, and can train on any free GPU. At each milestone, finalists
    wait for each other and are halved. The forecast ignores that `full_trainings` may let more finalists continue.
    There is no forecast if the run had no surrogates, or timed no full-size epoch.
    """
    if run.sweep is None or run.finalists is None or run.epoch_seconds is None:
        return []
    sweep, faster = run.sweep, run.epoch_seconds / epoch_seconds(scenario, run)
    trials = sweep.trials if scenario.trials is None else scenario.trials
    device_hours = sweep.device_seconds * trials / sweep.trials / faster / HOUR
    hours = max(device_hours / scenario.gpus, sweep.longest / faster / HOUR)
    finalists = [run.finalists.resampled(int(run.settings["top_k"]), seed) for seed in range(scenario.seeds)]
    full = _summary(TUNE, "tune()", _simulated(_full_size(run, scenario), finalists, run, scenario), run, scenario)
    return [
        replace(
            full,
            hours=hours + full.hours,
            hours_range=(hours + full.hours_range[0], hours + full.hours_range[1]),
            gpu_hours=device_hours + full.gpu_hours,
            reserved_gpu_hours=(hours + full.hours) * scenario.gpus,
            utilization=(device_hours + full.gpu_hours) / ((hours + full.hours) * scenario.gpus),
            sweep_hours=hours,
        )
    ]


def _full_size(run: PastRun, scenario: Scenario) -> AnyPlan:
    """Return the RASDA of `tune(backend="ray")` after a sweep: the run's settings, unless the scenario changes them."""
    before = run.settings["rasda"]
    max_t = scenario.max_t or int(run.settings["max_t"])
    grace = first_look(scenario.grace_period or before.get("grace_period"), max_t)
    return Plan(
        RASDA(
            max_t,
            min(grace, max_t),
            scenario.reduction_factor or before["reduction_factor"],
            scenario.scaling_factor or before["scaling_factor"],
            scenario.workers,
            scenario.max_workers,
            mode=run.workload.mode,
            wait=math.inf,
            grow=before.get("grow", "due"),
        )
    )


@dataclass(frozen=True)
class Recommendation:
    """The recommendation for a search with a deadline or a budget.

    Attributes:
        rule: The best forecast of a rule that keeps the limits with each seed, and whose winner is nearly the best
            trial (see `TOLERANCE`). With a deadline, the best forecast is the one with the fewest reserved GPU hours.
            Otherwise it is the fastest one. None if no rule keeps the limits.
        tune: The best forecast of `tune()` that keeps the limits; None if none does, or if the past run had no
            surrogates.
        nearest: The forecast that comes nearest to the limits.
    """

    rule: Forecast | None
    tune: Forecast | None
    nearest: Forecast


def recommend(
    run: PastRun, scenario: Scenario, within_hours: float | None = None, gpu_hours: float | None = None
) -> Recommendation:
    """Choose the number of GPUs, the workers of a new trial and a rule, for a deadline, a budget or both.

    It doubles the number of GPUs from the scenario's `workers` up to its `gpus`. For each number, it doubles the
    workers of a new trial from the scenario's `workers` up to the GPUs of a node.

    Args:
        scenario: Its `gpus` is the largest number of GPUs to try; its `workers` is the smallest number of workers of a
            new trial.
        within_hours: The deadline.
        gpu_hours: The budget in reserved GPU hours, which count all GPUs from start to end.

    Raises:
        ValueError: as in `forecast`, or if a limit is not above 0, or if no limit is given.
    """
    if within_hours is None and gpu_hours is None:
        raise ValueError("`within_hours` and `gpu_hours` are None, but one must be given")
    for name, limit in (("within_hours", within_hours), ("gpu_hours", gpu_hours)):
        if limit is not None:
            check_number(name, limit, above=0.0)
    check(scenario, run)
    tried: list[Forecast] = []
    for gpus in _doubled(scenario.workers, scenario.gpus):
        most = min(gpus, max(scenario.workers, scenario.gpus_per_node), scenario.max_workers or gpus)
        for workers in _doubled(scenario.workers, most):
            tried += forecast(run, replace(scenario, gpus=gpus, workers=workers, seeds=min(scenario.seeds, MOST_TRIED)))

    def over(each: Forecast) -> float:
        """Return the largest ratio of a forecast's longest search to a limit; at most 1 if it keeps the limits."""
        longest = each.hours_range[1]
        times = 0.0 if within_hours is None else longest / within_hours
        return max(times, 0.0 if gpu_hours is None else longest * each.gpus / gpu_hours)

    def best(forecasts: Iterable[Forecast]) -> Forecast | None:
        kept = [each for each in forecasts if over(each) <= 1]
        return min(kept, key=lambda f: f.hours if within_hours is None else f.reserved_gpu_hours, default=None)

    rules = [each for each in tried if each.rule != TUNE and each.relative_regret <= TOLERANCE]
    nearest = min(rules or tried, key=over)
    return Recommendation(best(rules), best(each for each in tried if each.rule == TUNE), nearest)


def _doubled(least: int, most: int) -> list[int]:
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return [*found, most]
