"""Simulated searches whose outcomes are recorded: what makes the simulator faster must leave them as they are."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving
from hydro_rasda.simulator import (
    AnyPlan,
    Cluster,
    CostModel,
    FixedWorkers,
    Link,
    NodeKind,
    Outcome,
    Plan,
    Workload,
    simulate,
)
from tests.hydro_rasda.simulator.other_rules import VaryingFactors, WhilePaying, fill_cluster

PLANS: dict[str, AnyPlan] = {
    "ASHA": Plan(FixedWorkers(AsyncSuccessiveHalving(27, 1, 3), 2)),
    "RASDA": Plan(RASDA(27, 1)),
    "capped": Plan(RASDA(27, 2, 3, 2, 2, max_workers=8), patience=2),
    "varying": Plan(VaryingFactors((2, 5, 11, 27), (4, 2, 2), (2, 4, 1), 2)),
    "paying": Plan(RASDA(27, 1, workers=2), WhilePaying(0.8)),
    "filling": Plan(RASDA(27, 3, workers=2), fill_cluster, patience=1),
}

CLUSTERS = {
    "small": Cluster.uniform(14),
    "large": Cluster.uniform(96),
    "troubled": Cluster(
        (NodeKind(6, 4), NodeKind(3, 8, speed=2.0)), slow_share=0.25, slow_speed=0.5, mtbf=1500.0, repair_seconds=60.0
    ),
    "failing": replace(Cluster.uniform(64), mtbf=900.0, repair_seconds=200.0, storage=1e6),
}

COSTS = {
    "alike": CostModel(step_seconds=1.0, steps=10),
    "noisy": CostModel(
        step_seconds=1.0,
        steps=10,
        serial_seconds=1.0,
        gradient_bytes=1e6,
        intra=Link(1e7),
        inter=Link(1e6, 0.01),
        overlap=0.5,
        jitter=0.05,
        epoch_noise=0.2,
        restart_seconds=3.0,
        checkpoint_seconds=1.0,
        dataset_bytes=1e5,
    ),
}


def workload(trials: int, epochs: int, seed: int, spread: float) -> Workload:
    """Curves that fall, of which some diverge; by sums and products alone, so that all machines draw the same."""
    rng = random.Random(seed)
    scores = np.empty((trials, epochs))
    for i in range(trials):
        end, start = rng.random(), 2 * rng.random()
        scores[i] = [end + start / (t + 1) + 0.05 * rng.random() for t in range(epochs)]
        if rng.random() < 0.05:
            scores[i, rng.randrange(epochs) :] = math.nan
    work = np.array([1 + spread * rng.random() for _ in range(trials)])
    return Workload(scores, work)


def searches() -> Iterator[tuple[str, AnyPlan, Workload, Cluster, CostModel]]:
    """Every plan on every cluster at every cost, with trials that cost the same and with trials that do not."""
    for plan in PLANS:
        for cluster in CLUSTERS:
            for cost in COSTS:
                yield (
                    f"{plan}, {cluster}, {cost}",
                    PLANS[plan],
                    workload(150, 27, seed=len(plan), spread=0.0 if cost == "alike" else 1.0),
                    CLUSTERS[cluster],
                    COSTS[cost],
                )


def digest(outcome: Outcome) -> str:
    """Of all segments and trials, to 9 digits: the last ones of a logarithm are the machine's."""
    numbers = [(outcome.events,), *((s.trial, s.start, s.stop, s.workers) for s in outcome.segments)]
    numbers += [tuple(trial.__dict__.values()) for trial in outcome.trials]
    text = "\n".join(" ".join(f"{number:.9g}" for number in row) for row in numbers)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digests() -> dict[str, str]:
    """Of all searches."""
    return {
        name: digest(simulate(plan, trials, cluster, cost, seed=len(name)))
        for name, plan, trials, cluster, cost in searches()
    }


if __name__ == "__main__":
    for name, found in digests().items():
        print(f'    "{name}": "{found}",')
