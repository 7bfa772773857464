"""Pure decisions: plain values go in, a decision comes out. No decision uses a clock, disk, device or cluster.

Real runs and the simulator use the same code.
"""

from hydro_rasda.schedulers.asha import AshaState, AsyncSuccessiveHalving, Decision
from hydro_rasda.schedulers.backfill_queue import Held, Placement, Queue, Waiting, place, worker_slots
from hydro_rasda.schedulers.halving_and_hyperband import Bracket, Hyperband, SuccessiveHalving
from hydro_rasda.schedulers.median_stopping import MedianStopping
from hydro_rasda.schedulers.milestones import MilestoneBarrier, first_milestone, milestones
from hydro_rasda.schedulers.named_rules import NoStopping, named_rule
from hydro_rasda.schedulers.packing_policy import (
    Job,
    Placed,
    Policy,
    Room,
    first_fit,
    first_fit_decreasing,
    one_a_device,
    worst_fit,
    worst_fit_decreasing,
    worst_fit_overcommitted,
)
from hydro_rasda.schedulers.population import PopulationBasedTraining, Range
from hydro_rasda.schedulers.race_rule import ExpectedEnd, Race, RaceRule, chances, expected_gain, final_score
from hydro_rasda.schedulers.ranking import Agreement, Mode, agreement, rank
from hydro_rasda.schedulers.rasda import RASDA, Growth, Resize, efficient, parallel_efficiency
from hydro_rasda.schedulers.sweep_rule import Continue, Move, Stop, SweepRule
from hydro_rasda.schedulers.sweep_state import Interval, Standing, SweepState

__all__ = [
    "RASDA",
    "Agreement",
    "AshaState",
    "AsyncSuccessiveHalving",
    "Bracket",
    "Continue",
    "Decision",
    "ExpectedEnd",
    "Growth",
    "Held",
    "Hyperband",
    "Interval",
    "Job",
    "MedianStopping",
    "MilestoneBarrier",
    "Mode",
    "Move",
    "NoStopping",
    "Placed",
    "Placement",
    "Policy",
    "PopulationBasedTraining",
    "Queue",
    "Race",
    "RaceRule",
    "Range",
    "Resize",
    "Room",
    "Standing",
    "Stop",
    "SuccessiveHalving",
    "SweepRule",
    "SweepState",
    "Waiting",
    "agreement",
    "chances",
    "efficient",
    "expected_gain",
    "final_score",
    "first_fit",
    "first_fit_decreasing",
    "first_milestone",
    "milestones",
    "named_rule",
    "one_a_device",
    "parallel_efficiency",
    "place",
    "rank",
    "worker_slots",
    "worst_fit",
    "worst_fit_decreasing",
    "worst_fit_overcommitted",
]
