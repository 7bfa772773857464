"""State of a simulated trial."""

from __future__ import annotations

from dataclasses import dataclass, field

from hydro_rasda.simulator.cluster import Allocation
from hydro_rasda.simulator.cost import Spread


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
    first_step: float = 0.0
    ended: float = 0.0
    began: float = 0.0
    noise: float = 1.0
    epoch_seconds: float = 0.0
    own_seconds: dict[int, float] = field(default_factory=dict)
    waited: float = 0.0
    restarts: int = 0
    lost_epochs: int = 0
