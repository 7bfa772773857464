"""No early stopping: every trial of a sweep trains to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hydro_rasda.checks import check_int
from hydro_rasda.schedulers.sweep_rule import Continue, Move, SweepRule
from hydro_rasda.schedulers.sweep_state import SweepState


@dataclass(frozen=True)
class NoStopping(SweepRule):
    """Train all trials to one epoch, and choose the finalists there.

    Attributes:
        last: That epoch.

    Raises:
        ValueError: If `last` is no integer or below 1.
    """

    last: int

    def __post_init__(self) -> None:
        check_int("last", self.last, at_least=1)

    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        """Have new trials train to the end."""
        return {number: Continue(self.last) for number in sweep.waiting_at(0)}

    def epochs(self, sweep: SweepState) -> int:
        """Epochs that all trials together train."""
        return (len(sweep.trials) + sweep.left) * self.last
