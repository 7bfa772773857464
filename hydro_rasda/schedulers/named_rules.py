"""The named rules of a sweep, and the rule that stops no trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from hydro_rasda.common.argument_checks import check_int
from hydro_rasda.schedulers.halving_and_hyperband import Bracket, Hyperband, SuccessiveHalving
from hydro_rasda.schedulers.median_stopping import MedianStopping
from hydro_rasda.schedulers.population import Explored, PopulationBasedTraining
from hydro_rasda.schedulers.ranking import Mode
from hydro_rasda.schedulers.sweep_rule import Continue, Move, RuleToLast, SweepRule
from hydro_rasda.schedulers.sweep_state import SweepState


@dataclass(frozen=True)
class NoStopping(RuleToLast):
    """Train all trials to the epoch `last`; the best of them become the finalists.

    Attributes:
        every: Epochs between two checkpoints on the way to `last`; None for no checkpoints.
    """

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        check_int("last", self.last, at_least=1)
        check_int("every", self.every, at_least=1, optional=True)

    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        every, behind = self.every or self.last, [trial for trial in sweep.waiting.values() if trial.epoch < self.last]
        return {trial.number: Continue(min(self.last, trial.epoch + every)) for trial in behind}


RuleName = Literal["halving", "hyperband", "median", "none", "pbt", "epsilon-net"]
RULES: tuple[str, ...] = get_args(RuleName)
POPULATION: RuleName = "pbt"
"""The rule that changes hyperparameters during the sweep."""
HALVING: RuleName = "halving"


def named_rule(
    name: RuleName,
    stops: Sequence[int],
    reduction_factor: int,
    mode: Mode,
    top_k: int,
    explored: Explored = MappingProxyType({}),
) -> SweepRule:
    """Make the rule of this name.

    The sweep may drop trials at the epochs `stops`, and ends at the last of them. `explored` names the hyperparameters
    that the rule "pbt" changes. If there are none, "pbt" raises ValueError.

    >>> named_rule("median", (2, 6, 18), 3, "min", 4)
    MedianStopping(last=18, grace_period=2, min_trials=3)
    """
    if name == "median":
        return MedianStopping(stops[-1], stops[0])
    if name == POPULATION:
        return PopulationBasedTraining(explored, stops[-1], stops[0])
    if name == "none":
        return NoStopping(stops[-1])
    if name == "hyperband":
        return Hyperband(SuccessiveHalving(stops, reduction_factor, mode))
    # "halving" and "epsilon-net" share this rule. They differ only in how `Comparison` orders trials by several
    # metrics.
    return Bracket(SuccessiveHalving(stops, reduction_factor, mode, keep_at_least=top_k))
