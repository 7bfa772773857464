"""Pure decisions: plain values in, a decision out. No clock, no disk, no device, no cluster.

The fused sweep, the Ray backend and the simulator decide by these same rules.
"""

from hydro_rasda.config import Mode
from hydro_rasda.schedulers.asha import AshaState, AsyncSuccessiveHalving, Decision, PlainAshaState
from hydro_rasda.schedulers.halving import SuccessiveHalving
from hydro_rasda.schedulers.ladder import Ladder
from hydro_rasda.schedulers.milestones import first_milestone, milestones
from hydro_rasda.schedulers.placement import Placement, Queue, Running, Waiting, place, worker_slots
from hydro_rasda.schedulers.ranking import rank, top
from hydro_rasda.schedulers.rasda import RASDA, Verdict

__all__ = [
    "RASDA",
    "AshaState",
    "AsyncSuccessiveHalving",
    "Decision",
    "Ladder",
    "Mode",
    "Placement",
    "PlainAshaState",
    "Queue",
    "Running",
    "SuccessiveHalving",
    "Verdict",
    "Waiting",
    "first_milestone",
    "milestones",
    "place",
    "rank",
    "top",
    "worker_slots",
]
