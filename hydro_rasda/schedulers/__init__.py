"""Pure decisions: plain values in, a decision out. No clock, no disk, no device, no cluster.

Real runs and the simulator decide by the same code.
"""

from hydro_rasda.config import Mode
from hydro_rasda.schedulers.agreement import Agreement, agreement
from hydro_rasda.schedulers.asha import AshaState, AsyncSuccessiveHalving, Decision
from hydro_rasda.schedulers.bracket import Bracket
from hydro_rasda.schedulers.gathering import Gathering
from hydro_rasda.schedulers.growth import Growth, Resize, efficient, parallel_efficiency
from hydro_rasda.schedulers.halving import SuccessiveHalving
from hydro_rasda.schedulers.milestones import first_milestone, milestones
from hydro_rasda.schedulers.packing import (
    Job,
    Placed,
    Policy,
    Room,
    first_fit,
    first_fit_decreasing,
    one_a_device,
    worst_fit,
    worst_fit_decreasing,
)
from hydro_rasda.schedulers.placement import Held, Placement, Queue, Waiting, place, worker_slots
from hydro_rasda.schedulers.race import Outlook, Race, chances, expected_gain, race_milestones
from hydro_rasda.schedulers.ranking import rank
from hydro_rasda.schedulers.rasda import RASDA, Verdict
from hydro_rasda.schedulers.sharing import FastestTogether, Interference
from hydro_rasda.schedulers.sweep_rule import Drop, GoOn, Move, Standing, SweepRule, SweepState

__all__ = [
    "RASDA",
    "Agreement",
    "AshaState",
    "AsyncSuccessiveHalving",
    "Bracket",
    "Decision",
    "Drop",
    "FastestTogether",
    "Gathering",
    "GoOn",
    "Growth",
    "Held",
    "Interference",
    "Job",
    "Mode",
    "Move",
    "Outlook",
    "Placed",
    "Placement",
    "Policy",
    "Queue",
    "Race",
    "Resize",
    "Room",
    "Standing",
    "SuccessiveHalving",
    "SweepRule",
    "SweepState",
    "Verdict",
    "Waiting",
    "agreement",
    "chances",
    "efficient",
    "expected_gain",
    "first_fit",
    "first_fit_decreasing",
    "first_milestone",
    "milestones",
    "one_a_device",
    "parallel_efficiency",
    "place",
    "race_milestones",
    "rank",
    "worker_slots",
    "worst_fit",
    "worst_fit_decreasing",
]
