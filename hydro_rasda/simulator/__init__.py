"""A cluster in virtual time: how long a search takes and what it costs on machines that you do not have.

The code of `hydro_rasda.schedulers` decides which trials continue and on how many workers, as in real runs. Only
learning curves, training costs and nodes are simulated.

`forecast(read_past_run("runs/digits"), Scenario(gpus=64))` compares rules, as `hydro-rasda simulate` does. `simulate`
runs one plan on one workload.
"""

from hydro_rasda.schedulers import Growth, Resize
from hydro_rasda.simulator.cluster import Cluster, NodeKind
from hydro_rasda.simulator.forecast import Forecast, Recommendation, forecast, recommend, simulate
from hydro_rasda.simulator.outcome import Outcome, Segment, Spending, TrialOutcome, spending, why
from hydro_rasda.simulator.past_run import PastRun, SweepCost
from hydro_rasda.simulator.past_run_formats import read_past_run
from hydro_rasda.simulator.rules import AnyPlan, FixedWorkers, Plan, Rule, random_search, synchronous_halving
from hydro_rasda.simulator.scenario import RULES, Scenario
from hydro_rasda.simulator.training_time import CostModel, Link, Spread, all_reduce, hierarchical_all_reduce
from hydro_rasda.simulator.workload import Workload, power_law

__all__ = ["RULES", "AnyPlan", "Cluster", "CostModel", "FixedWorkers", "Forecast", "Growth", "Link", "NodeKind"]
__all__ += ["Outcome", "PastRun", "Plan", "Recommendation", "Resize", "Rule", "Scenario", "Segment", "Spending"]
__all__ += ["Spread", "SweepCost", "TrialOutcome", "Workload", "all_reduce", "forecast", "hierarchical_all_reduce"]
__all__ += ["power_law", "random_search", "read_past_run", "recommend", "simulate", "spending", "synchronous_halving"]
__all__ += ["why"]
