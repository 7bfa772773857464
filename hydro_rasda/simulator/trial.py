"""What the simulation keeps of a trial, and what it waits for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hydro_rasda.simulator.cluster import Allocation
from hydro_rasda.simulator.cost import Spread

Kind = Literal["epoch", "reading", "failure", "repair", "patience"]

Event = tuple[float, int, Kind, int, int]
"""Time, sequence number, kind, trial (or node, or milestone), and the segment that an epoch belongs to. "reading" is
where an epoch's data begin to be read; when that ends depends on who else comes and goes, and `SharedStorage` alone
knows it. "patience" is where a trial that waits at a milestone has waited its share."""


@dataclass(slots=True)
class Trial:
    """A trial: how far it came, the workers that it has, and what its present epoch takes."""

    name: str
    scores: list[float]
    work: float
    workers: int
    epoch: int = 0
    saved: int = 0
    rung: int = 0
    segment: int = 0
    allocation: Allocation = field(default_factory=dict)
    spread: Spread = field(default_factory=lambda: Spread(1))
    training: float = 0.0
    since: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    began: float = 0.0
    noise: float = 1.0
    epoch_seconds: float = 0.0
    own_seconds: dict[int, float] = field(default_factory=dict)
    waited: float = 0.0
    restarts: int = 0
    lost_epochs: int = 0
