"""Hyperband: brackets of successive halving that begin at different rungs.

Li et al., "Hyperband: A novel bandit-based approach to hyperparameter optimization" (2018), Algorithm 1. Successive
halving drops most trials after their first epochs, and with them those that start slowly. Hyperband gives a share of
the trials more epochs before their first decision. All brackets train at once, so that no device waits for a bracket.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from hydro_rasda.schedulers.asynchronous_halving import Bracket
from hydro_rasda.schedulers.halving import SuccessiveHalving
from hydro_rasda.schedulers.sweep_rule import Move, SweepRule
from hydro_rasda.schedulers.sweep_state import SweepState


class Hyperband(SweepRule):
    """Share the trials of a sweep among brackets.

    Bracket s has s + 1 of the milestones, the last ones. Each trial belongs to one bracket, by its number, so that
    trials that come later change nothing for those that are there. The finalists are the best of all brackets at the
    last milestone.

    Args:
        halving: The milestones, the reduction factor and the mode of the longest bracket.

    Attributes:
        sizes: Trials of each bracket in a full round, by s (n in Algorithm 1).

    >>> Hyperband(SuccessiveHalving((1, 3, 9), 3, "min")).sizes
    (3, 5, 9)
    """

    def __init__(self, halving: SuccessiveHalving) -> None:
        stops, eta = halving.milestones, halving.reduction_factor
        count = len(stops)
        self.sizes = tuple(math.ceil(count * eta**s / (s + 1)) for s in range(count))
        self._round = _spread(self.sizes)
        self._brackets = [
            Bracket(
                SuccessiveHalving(stops[-s - 1 :], eta, halving.mode), partial(_is_of, s, self._round), to_the_end=True
            )
            for s in range(count)
        ]

    def bracket_of(self, number: int) -> int:
        """Return s of the bracket that a trial belongs to."""
        return self._round[number % len(self._round)]

    def admit(self, sweep: SweepState) -> int:
        """Admit all configurations that there are, once the earlier ones have passed their first rung."""
        return min(bracket.admit(sweep) for bracket in self._brackets)

    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        moves: dict[int, Move] = {}
        for bracket in self._brackets:
            moves |= bracket.decide(sweep)
        return moves

    def epochs(self, sweep: SweepState) -> int:
        return sum(bracket.epochs(sweep) for bracket in self._brackets)


def _is_of(s: int, round_: tuple[int, ...], number: int) -> bool:
    return round_[number % len(round_)] == s


def _spread(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Order the places of a round so that each part of it has of each bracket its share.

    >>> _spread((1, 1, 2))
    (2, 0, 1, 2)
    """
    total = sum(sizes)
    found: list[int] = []
    for place in range(1, total + 1):
        missing = [size * place / total - found.count(s) for s, size in enumerate(sizes)]
        found.append(max(range(len(sizes)), key=missing.__getitem__))
    return tuple(found)
