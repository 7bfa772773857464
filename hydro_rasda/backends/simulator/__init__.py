"""A cluster in virtual time: how long a study takes, and what it costs, on machines that one does not have.

The rules that decide are those of ``hydro_rasda.schedulers``; only learning curves, costs and nodes are models.
"""

from hydro_rasda.backends.simulator.cluster import Cluster, NodeKind
from hydro_rasda.backends.simulator.cost import CostModel, Link, Spread, all_reduce, hierarchical_all_reduce
from hydro_rasda.backends.simulator.engine import simulate
from hydro_rasda.backends.simulator.lcbench import lcbench, lcbench_folder, lcbench_tasks
from hydro_rasda.backends.simulator.outcome import Outcome, Segment, TrialOutcome
from hydro_rasda.backends.simulator.past_run import PastRun, read_past_run
from hydro_rasda.backends.simulator.resize import FillCluster, Growth, Resize, WhilePaying, as_due
from hydro_rasda.backends.simulator.rules import AnyPlan, FixedWorkers, Plan, Rule, VaryingFactors
from hydro_rasda.backends.simulator.workload import Workload, power_law

__all__ = [
    "AnyPlan",
    "Cluster",
    "CostModel",
    "FillCluster",
    "FixedWorkers",
    "Growth",
    "Link",
    "NodeKind",
    "Outcome",
    "PastRun",
    "Plan",
    "Resize",
    "Rule",
    "Segment",
    "Spread",
    "TrialOutcome",
    "VaryingFactors",
    "WhilePaying",
    "Workload",
    "all_reduce",
    "as_due",
    "hierarchical_all_reduce",
    "lcbench",
    "lcbench_folder",
    "lcbench_tasks",
    "power_law",
    "read_past_run",
    "simulate",
]
