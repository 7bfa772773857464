"""RASDA's weak scaling in virtual time, what it can be explained by, and its run on 1,024 GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import mean

from benchmarks.rasda_settings import (
    CFD,
    CV,
    GB,
    Application,
    Assumptions,
    asha,
    cluster,
    cost_model,
    curves,
    rasda,
    run,
    scaled,
    seconds,
)
from benchmarks.result_files import Row
from hydro_rasda.schedulers import RASDA, AshaState, Decision, Verdict, milestones
from hydro_rasda.simulator import AnyPlan, Cluster, CostModel, Outcome, Plan, Workload, simulate

SIZES = (128, 256, 512, 1024)
LARGER = 4096
GRACES = (1, 3)
MAX_T = 6
STORAGE = 300 * GB
"""Fitted: the round number with which the run of three hours takes about that (see `thousand`)."""


def small_weak_scaling(a: Assumptions, seeds: Sequence[int]) -> list[Row]:
    """Fig. 3: ResNet-50 for 20 epochs on 8 to 64 GPUs of JURECA, trials in proportion."""
    rows = []
    for gpus in (8, 16, 32, 64):
        app = scaled(CV, gpus, max_t=20)
        plain, elastic = seconds(run(app, asha(app), a, seeds)), seconds(run(app, rasda(app), a, seeds))
        rows.append({"GPUs": gpus, "trials": app.trials, "ASHA_s": plain, "RASDA_s": elastic, "ratio": plain / elastic})
    return rows


@dataclass(frozen=True)
class Settled(RASDA):
    """RASDA whose survivors are settled beforehand: exactly one in `reduction_factor` of those at each milestone.

    Which trials come first, by chance, then no longer decides how many go on: what is left is the machine.
    """

    survivors: Mapping[int, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, rule: RASDA, workload: Workload) -> Settled:
        """The best at each milestone, of those that survived the one before."""
        left = sorted(range(workload.trials))
        survivors = {}
        for milestone in rule.milestones[:-1]:
            left = sorted(left, key=lambda i: workload.scores[i, milestone - 1])[: len(left) // rule.reduction_factor]
            survivors[milestone] = frozenset(map(str, left))
        return cls(**{each.name: getattr(rule, each.name) for each in fields(rule)}, survivors=survivors)

    def report(self, state: AshaState, trial: str, t: int, score: float) -> tuple[AshaState, Verdict]:
        """Look the trial up."""
        decision = Decision.CONTINUE if trial in self.survivors.get(t, ()) else Decision.STOP
        return state, Verdict(decision, self.workers_at(t))


@dataclass(frozen=True)
class Machine:
    """What a machine has besides nodes of one speed."""

    name: str
    launch_seconds: float = 0.0
    speed_spread: float = 0.0
    staged: bool = False

    def of(self, app: Application) -> Cluster:
        """The application's cluster."""
        return replace(
            cluster(app),
            launch_seconds=self.launch_seconds,
            speed_spread=self.speed_spread,
            staged_bytes=app.dataset_bytes if self.staged else 0.0,
            storage=STORAGE,
        )


PERFECT = Machine("nothing of the kind")
MACHINES = (
    PERFECT,
    Machine("the head node starts processes one after another, 0.2 s each", launch_seconds=0.2),
    Machine("0.3 s each", launch_seconds=0.3),
    Machine("0.5 s each", launch_seconds=0.5),
    Machine("nodes keep speeds that differ by 2 %", speed_spread=0.02),
    Machine("by 5 %", speed_spread=0.05),
    Machine("each node copies the data first", staged=True),
    Machine("all three: 0.2 s, 2 %, copies", 0.2, 0.02, True),
    Machine("all three: 0.3 s, 5 %, copies", 0.3, 0.05, True),
)


def _application(gpus: int) -> Application:
    return replace(scaled(CV, gpus, max_t=MAX_T), links=4)


def weak_scaling(a: Assumptions, seeds: Sequence[int]) -> list[Row]:
    """Fig. 4: ResNet-50 for six epochs on 128 to 1,024 GPUs of JUWELS Booster, and beyond, on a perfect machine."""
    rows: list[Row] = []
    for grace in GRACES:
        for survivors in ("as they come", "exactly half"):
            reference = 0.0
            for gpus in (*SIZES, LARGER):
                app = _application(gpus)
                few = seeds if gpus <= SIZES[-1] else seeds[:4]
                outcomes = _searches(app, grace, a, few, PERFECT, exact=survivors == "exactly half")
                reference = reference or seconds(outcomes)
                rows.append(
                    {
                        "milestones": list(milestones(grace, MAX_T, 2)),
                        "survivors": survivors,
                        "GPUs": gpus,
                        "trials": app.trials,
                        "seeds": len(few),
                        "to_the_end": mean(len(o.finished) for o in outcomes) / app.trials,
                        "RASDA_s": seconds(outcomes),
                        "efficiency": reference / seconds(outcomes),
                        "utilization": mean(o.utilization for o in outcomes),
                    }
                )
    return rows


def causes(a: Assumptions, seeds: Sequence[int]) -> list[Row]:
    """Weak efficiency where exactly half survive, on 1,024 GPUs over 128, by what the machine has."""
    rows = []
    for machine in MACHINES:
        row: Row = {"machine": machine.name}
        for grace in GRACES:
            took = {}
            for gpus in (SIZES[0], SIZES[-1]):
                took[gpus] = seconds(_searches(_application(gpus), grace, a, seeds, machine, exact=True))
            stops = ", ".join(map(str, milestones(grace, MAX_T, 2)))
            row[f"{SIZES[-1]:,} GPUs s ({stops})"] = took[SIZES[-1]]
            row[f"efficiency ({stops})"] = took[SIZES[0]] / took[SIZES[-1]]
        rows.append(row)
    return rows


def _searches(
    app: Application, grace: int, a: Assumptions, seeds: Iterable[int], machine: Machine, exact: bool
) -> list[Outcome]:
    """Parametric curves: who is good is known early on, so that the settled survivors are those of the rule."""
    plan, cost, where = rasda(app, grace), cost_model(app, a), machine.of(app)
    outcomes = []
    for seed in seeds:
        workload = curves("power law", app.trials, app.max_t, seed)
        rule: AnyPlan = Plan(Settled.of(plan.rule, workload)) if exact else plan  # type: ignore[arg-type]
        outcomes.append(simulate(rule, workload, where, cost, seed))
    return outcomes


def thousand(a: Assumptions, seeds: Sequence[int]) -> list[Row]:
    """Sec. 5.4: CFD, 64 trials from 16 GPUs on 1,024, 20 epochs: three hours in the paper."""
    large = replace(CFD, gpus=1024, trials=64, workers=16, max_t=20)
    large = replace(large, asha_seconds=CFD.asha_seconds / CFD.max_t * large.max_t * CFD.workers / large.workers)
    rows = []
    for storage in (math.inf, 1200 * GB, 600 * GB, STORAGE, 150 * GB, 75 * GB):
        hours = seconds(_with_storage(large, rasda(large), a, seeds, storage)) / 3600
        plain, elastic = (seconds(_with_storage(CFD, plan, a, seeds, storage)) for plan in (asha(CFD), rasda(CFD)))
        fitted = ", fitted" if storage == STORAGE else ""
        label = "data never wait" if math.isinf(storage) else f"shared storage, {storage / GB:,.0f} GB/s{fitted}"
        rows.append({"model": label, "hours": hours, "paper_hours": 3.0, "CFD_ratio_on_128": plain / elastic})
    return rows


def _with_storage(
    app: Application, plan: AnyPlan, a: Assumptions, seeds: Iterable[int], storage: float
) -> list[Outcome]:
    cost: CostModel = replace(cost_model(app, a), dataset_bytes=app.dataset_bytes)
    machine = replace(cluster(app), storage=storage)
    return [simulate(plan, curves(a.curves, app.trials, app.max_t, s), machine, cost, s) for s in seeds]
