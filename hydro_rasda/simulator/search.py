"""A search in virtual time, from its first trial to its last."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from hydro_rasda.checks import check_is, require
from hydro_rasda.simulator.cluster import Cluster
from hydro_rasda.simulator.cost import CostModel
from hydro_rasda.simulator.engine import Simulation
from hydro_rasda.simulator.outcome import Outcome
from hydro_rasda.simulator.rules import AnyPlan, Plan
from hydro_rasda.simulator.workload import Workload


def simulate(plan: AnyPlan, workload: Workload, cluster: Cluster, cost: CostModel, seed: int = 0) -> Outcome:
    """Simulates a search over all trials of a workload.

    Args:
        workload: The trials. They start in the order of the table, each as soon as workers are free.
        cost: The time that epochs, restarts and checkpoints take.
        seed: Determines epoch noise, slow nodes and failures. The same arguments give the same outcome.

    Returns:
        Run time, GPU time and what became of each trial.

    Raises:
        ValueError: if the curves are shorter than `max_t`, the rule's mode is not the workload's, a new trial needs
            more workers than there are, or `plan.resize` gives none.
        RuntimeError: if node failures hit one trial over and over.

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
    """A simulation makes no cycles: the collector would only walk through the many objects that it keeps."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
