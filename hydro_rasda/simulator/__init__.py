"""A cluster in virtual time: how long a search takes, and what it costs, on machines that one does not have.

The code that decides which trials go on, and on how many workers, is that of `hydro_rasda.schedulers`, which decides in
real runs, too. Only learning curves, the costs of training and the nodes are models.

`forecast(read_past_run("runs/digits"), Study(gpus=64))` compares rules, as `hydro-rasda simulate` does; `simulate` runs
one plan on one workload.
"""

from hydro_rasda.schedulers import Growth, Resize
from hydro_rasda.simulator.cluster import Cluster, NodeKind
from hydro_rasda.simulator.cost import CostModel, Link, Spread, all_reduce, hierarchical_all_reduce
from hydro_rasda.simulator.engine import simulate
from hydro_rasda.simulator.forecast import Forecast, Recommendation, forecast, recommend
from hydro_rasda.simulator.lcbench import lcbench, lcbench_folder, lcbench_tasks
from hydro_rasda.simulator.outcome import Outcome, Segment, TrialOutcome
from hydro_rasda.simulator.packing import Machine, PackingOutcome, simulate_packing
from hydro_rasda.simulator.past_run import PastRun, Sweep
from hydro_rasda.simulator.reading import read_past_run
from hydro_rasda.simulator.resize import FillCluster, WhilePaying, as_due
from hydro_rasda.simulator.rules import (
    AnyPlan,
    FixedWorkers,
    Plan,
    Rule,
    VaryingFactors,
    random_search,
    synchronous_halving,
)
from hydro_rasda.simulator.spending import Spending, spending, why
from hydro_rasda.simulator.study import RULES, Study
from hydro_rasda.simulator.workload import Workload, power_law

__all__ = [
    "RULES",
    "AnyPlan",
    "Cluster",
    "CostModel",
    "FillCluster",
    "FixedWorkers",
    "Forecast",
    "Growth",
    "Link",
    "Machine",
    "NodeKind",
    "Outcome",
    "PackingOutcome",
    "PastRun",
    "Plan",
    "Recommendation",
    "Resize",
    "Rule",
    "Segment",
    "Spending",
    "Spread",
    "Study",
    "Sweep",
    "TrialOutcome",
    "VaryingFactors",
    "WhilePaying",
    "Workload",
    "all_reduce",
    "as_due",
    "forecast",
    "hierarchical_all_reduce",
    "lcbench",
    "lcbench_folder",
    "lcbench_tasks",
    "power_law",
    "random_search",
    "read_past_run",
    "recommend",
    "simulate",
    "simulate_packing",
    "spending",
    "synchronous_halving",
    "why",
]
