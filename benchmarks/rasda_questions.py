"""What RASDA's paper leaves open, as far as virtual time can say: factors that vary, growth that pays, the margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks.rasda_rules import FillCluster, VaryingFactors, WhilePaying
from benchmarks.rasda_settings import (
    APPLICATIONS,
    CV,
    GB,
    Application,
    Assumptions,
    asha,
    cost_model,
    curves,
    rasda,
    run,
    seconds,
)
from hydro_rasda.simulator import (
    AnyPlan,
    Outcome,
    Plan,
    Spread,
)

Row = dict[str, Any]


def factors(a: Assumptions, seeds: Sequence[int]) -> list[Row]:
    """Fixed against adaptive rf and sf, on CV's machine with twice the trials that fit at once."""
    app = replace(CV, trials=64)
    fixed = [(f"rf {rf}, sf {sf}", rasda(app, rf=rf, sf=sf)) for rf in (2, 3, 4) for sf in (2, 3, 4)]
    rungs = (5, 10, 20, 40)
    adaptive: list[tuple[str, AnyPlan]] = [
        ("ASHA, rf 2", asha(app)),
        ("ASHA, rf 4", asha(app, rf=4)),
        *fixed,
        ("rf 4-2-2, sf 2", Plan(VaryingFactors(rungs, (4, 2, 2), (2, 2, 2), 2))),
        ("rf 2-2-4, sf 2", Plan(VaryingFactors(rungs, (2, 2, 4), (2, 2, 2), 2))),
        ("rf 4-2-2, sf 4-2-2", Plan(VaryingFactors(rungs, (4, 2, 2), (4, 2, 2), 2))),
        ("rf 2, sf adaptive: even share of the living", Plan(rasda(app).rule, FillCluster())),
        ("rf 2, sf adaptive: even share, counting on the next halving", Plan(rasda(app).rule, FillCluster(2, 0.5))),
    ]
    return [_quality(label, app, run(app, plan, a, seeds), a, seeds) for label, plan in adaptive]


def _quality(label: str, app: Application, outcomes: list[Outcome], a: Assumptions, seeds: Sequence[int]) -> Row:
    """Cost, and how much worse the winner is than the best of all trials trained to the end."""
    best = [curves(a.curves, app.trials, app.max_t, seed, a.work_spread).best(app.max_t) for seed in seeds]
    regrets = [o.best_score - b for o, b in zip(outcomes, best)]
    return {
        "rule": label,
        "run_s": seconds(outcomes),
        "GPU_hours": mean(o.gpu_seconds for o in outcomes) / 3600,
        "utilization": mean(o.utilization for o in outcomes),
        "epochs": mean(o.epochs for o in outcomes),
        "regret_mean": mean(regrets),
        "regret_0_share": mean(regret <= 0 for regret in regrets),
    }


def paying(a: Assumptions, seeds: Sequence[int]) -> list[Row]:
    """Growing as due, against growing only while the efficiency of the last growth pays."""
    rows = []
    for machine, assumed in (
        ("as stated", a),
        ("serial share 0.3", replace(a, serial=0.3)),
        ("1 Gbit/s Ethernet between nodes", replace(a, link_bandwidth=0.125 * GB / CV.links)),
    ):
        cost = cost_model(CV, assumed)
        probe = {n: cost.epoch(Spread(n, math.ceil(n / 4))) for n in (2, 4, 8, 16)}
        rules: list[tuple[str, AnyPlan]] = [("ASHA", asha(CV)), ("RASDA, as due", rasda(CV))]
        rules += [(f"while efficiency >= {t}", Plan(rasda(CV).rule, WhilePaying(t))) for t in (0.6, 0.75, 0.9)]
        rules += [(f"probed, efficiency >= {t}", Plan(rasda(CV).rule, WhilePaying(t, probe))) for t in (0.6, 0.75, 0.9)]
        for label, plan in rules:
            outcomes = run(CV, plan, assumed, seeds)
            rows.append(
                {
                    "machine": machine,
                    "rule": label,
                    "run_s": seconds(outcomes),
                    "GPU_hours": mean(o.gpu_seconds for o in outcomes) / 3600,
                    "most_GPUs": max(s.workers for o in outcomes for s in o.segments),
                }
            )
    return rows


def break_even(a: Assumptions, seeds: Sequence[int]) -> list[Row]:
    """How many more epochs larger batches might cost after the first milestone before RASDA loses to ASHA."""
    rows = []
    for app in APPLICATIONS:
        cost = cost_model(app, a)
        first = 5 * app.asha_seconds / app.max_t + cost.restart_seconds
        plain, elastic = (seconds(run(app, plan, a, seeds)) for plan in (asha(app), rasda(app)))
        rows.append({"application": app.name, "epochs_factor": (plain - first) / (elastic - first)})
    return rows
