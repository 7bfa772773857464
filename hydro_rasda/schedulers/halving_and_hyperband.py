"""Successive halving on one or several devices, and Hyperband, whose brackets of halving begin at different rungs.

Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization" (2016). Synchronous
halving decides a rung when all of its trials are there, so that devices are idle until the last trial arrives. If a
device is idle, a `Bracket` lets a trial continue early. The trial must be among the best `1 / reduction_factor` of
those that reached the rung so far. This is ASHA's promotion (Li et al. 2020, Algorithm 2). On one device, the decisions
are those of synchronous halving.

Hyperband is Algorithm 1 of Li et al., "Hyperband: A novel bandit-based approach to hyperparameter optimization" (2018).
Successive halving drops most trials after their first epochs, including those that only start slowly. Hyperband gives
some of the trials more epochs before their first decision. All brackets train at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TypeVar

from hydro_rasda.common.argument_checks import check_int, check_is, check_mode
from hydro_rasda.schedulers.ranking import Mode, TrialT, ranked
from hydro_rasda.schedulers.sweep_rule import Continue, Move, Stop, SweepRule
from hydro_rasda.schedulers.sweep_state import Standing, SweepState


@dataclass(frozen=True)
class SuccessiveHalving:
    """Keep the best `1 / reduction_factor` of a rung.

    The rule has no state: a decision depends only on the rung's scores.

    Attributes:
        milestones: Training iterations at which a rung ends, strictly increasing (see `milestones`).
        reduction_factor: `n // reduction_factor` of `n` trials continue.
        keep_at_least: Least number of trials that continue.
    """

    milestones: Sequence[int]
    reduction_factor: int
    mode: Mode
    keep_at_least: int = 1

    def __post_init__(self) -> None:
        check_int("reduction_factor", self.reduction_factor, at_least=2)
        check_int("keep_at_least", self.keep_at_least, at_least=1)
        check_mode(self.mode)
        object.__setattr__(self, "milestones", tuple(self.milestones))
        rising = all(a < b for a, b in zip((0, *self.milestones), self.milestones))
        if not self.milestones or not rising:
            raise ValueError(f"`milestones` is {self.milestones}, but must be positive and strictly increasing")

    def promote(self, scores: Mapping[TrialT, float], *, complete: bool = True) -> tuple[TrialT, ...]:
        """Return the trials that continue to the next rung, best first.

        `max(keep_at_least, n // reduction_factor)` of the `n` trials continue. There are fewer if not enough scores are
        finite, because a diverged trial is never promoted. If scores are equal, the trial with the lower number counts
        as better, so that the order of `scores` does not matter.

        Args:
            complete: True if `scores` has all trials of the rung. If False, only `n // reduction_factor` trials
                continue. They continue early, so that no device waits for the last trial (ASHA's promotion, Li et al.
                2020, Alg. 2).

        >>> SuccessiveHalving((1, 3, 9), 3, "min").promote({3: 0.5, 1: 0.2, 2: 0.2, 0: 0.9})
        (1,)
        """
        count = max(self.keep_at_least if complete else 0, len(scores) // self.reduction_factor)
        best_first = ranked({trial: scores[trial] for trial in sorted(scores)}, self.mode)
        return tuple(trial for trial in best_first[:count] if math.isfinite(scores[trial]))


T = TypeVar("T")


class Bracket(SweepRule):
    """The rungs of successive halving. This is the default rule of a sweep.

    Args:
        halving: Decides a rung. Its `keep_at_least` is the number of finalists. The mode of the sweep replaces its
            mode, because with several metrics a score is a rank, and the lowest rank is the best.
        holds: Takes a trial's number, and tells whether the trial belongs to this bracket. None includes all trials.
        to_the_end: If True, the best trials train to the last milestone, however few they are. If False, the last rung
            is the first one that leaves at most `keep_at_least` trials.
    """

    def __init__(
        self, halving: SuccessiveHalving, holds: Callable[[int], bool] | None = None, to_the_end: bool = False
    ) -> None:
        check_is("halving", halving, SuccessiveHalving)
        self._halving, self._holds, self._to_the_end = halving, holds, to_the_end

    def admit(self, sweep: SweepState) -> int:
        """Return how many configurations to admit: all that are left, once earlier ones passed the first rung."""
        first = self._halving.milestones[0]
        return 0 if self._any(sweep.waiting_at(0)) or self._any(sweep.training_to(first)) else sweep.left

    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        """Decide the lowest undecided rung, once all of its trials are there.

        If a device is idle before that, the best trials continue early.
        """
        stops = self._milestones(sweep)
        if new := self._waiting_at(0, sweep):
            return {number: Continue(stops[0]) for number in new}
        there = (at for at in stops if self._any(sweep.training_to(at)) or self._any(sweep.waiting_at(at)))
        lowest = next(there, None)
        if lowest is not None and not sweep.left and not self._any(sweep.training_to(lowest)):
            return self._decided(lowest, stops, sweep)
        return self._early(stops, sweep) if sweep.idle else {}

    def _decided(self, stop: int, stops: Sequence[int], sweep: SweepState) -> dict[int, Move]:
        """Return the moves by which the best trials of a rung continue, and the others stop.

        Trials that are kept at the last rung get no move: they wait until the sweep is over.
        """
        if self._to_the_end and stop == stops[-1]:
            return {}
        kept = self._promoted(stop, sweep)
        waiting, going_on = self._waiting_at(stop, sweep), set(kept)
        moves: dict[int, Move] = {number: Stop() for number in waiting if number not in going_on}
        if not self._is_last(stop, kept, stops):
            above = next(later for later in stops if later > stop)
            moves |= {number: Continue(above) for number in kept if number in waiting}
        return moves

    def _early(self, stops: Sequence[int], sweep: SweepState) -> dict[int, Move]:
        """Return the moves by which trials continue early, because they are among the best of their rung so far.

        Choose the lowest rung with such trials.
        """
        for stop, above in pairwise(stops):
            if self._holds is None:
                found = sweep.leading(stop, len(sweep.scores.get(stop, ())) // self._halving.reduction_factor)
            else:
                waiting = self._waiting_at(stop, sweep)
                promoted = self._promoted(stop, sweep, complete=False) if waiting else ()
                found = [number for number in promoted if number in waiting]
            if found:
                return {number: Continue(above) for number in found}
        return {}

    def finalists(self, sweep: SweepState) -> Sequence[int]:
        """Return the best trials of the first rung that leaves at most `keep_at_least` trials."""
        stops = self._milestones(sweep)
        for stop in stops:
            kept = self._promoted(stop, sweep)
            if self._is_last(stop, kept, stops):
                break
        return kept[: self._halving.keep_at_least]

    def epochs(self, sweep: SweepState) -> int:
        return sum(size * epochs for size, epochs in self.rungs(sweep))

    def rungs(self, sweep: SweepState) -> list[tuple[int, int]]:
        """Return for each rung the expected number of trials, and the epochs that each trial trains to reach it."""
        spans = pairwise((0, *self._halving.milestones))
        return [(size, stop - start) for size, (start, stop) in zip(self._sizes(sweep), spans)]

    def _waiting_at(self, stop: int, sweep: SweepState) -> Mapping[int, Standing]:
        return self._own(sweep.waiting_at(stop))

    def _promoted(self, stop: int, sweep: SweepState, complete: bool = True) -> tuple[int, ...]:
        halving = replace(self._halving, mode=sweep.mode)
        return halving.promote(self._own(sweep.scores.get(stop, {})), complete=complete)

    def _own(self, by_number: Mapping[int, T]) -> Mapping[int, T]:
        if self._holds is None:
            return by_number
        return {number: of for number, of in by_number.items() if self._holds(number)}

    def _any(self, numbers: Mapping[int, Standing]) -> bool:
        """Tell whether any of these trials belongs to this bracket."""
        return bool(numbers) if self._holds is None else any(map(self._holds, numbers))

    def _is_last(self, stop: int, kept: Sequence[int], stops: Sequence[int]) -> bool:
        few = len(kept) <= self._halving.keep_at_least and not self._to_the_end
        return few or stop == stops[-1]

    def _milestones(self, sweep: SweepState) -> tuple[int, ...]:
        """Return the milestones that are needed, up to the one whose decision leaves the finalists."""
        return tuple(self._halving.milestones[: len(self._sizes(sweep))])

    def _sizes(self, sweep: SweepState) -> list[int]:
        """Return the expected number of trials for each needed rung."""
        keep, total = self._halving.keep_at_least, len(sweep.trials) + sweep.left
        sizes = [total if self._holds is None else _size(self._holds, total)]
        while len(sizes) < len(self._halving.milestones):
            following = sizes[-1] // self._halving.reduction_factor
            if following <= keep and not self._to_the_end:
                break
            sizes.append(max(following, min(keep, sizes[-1])))
        return sizes


@lru_cache(maxsize=64)
def _size(holds: Callable[[int], bool], total: int) -> int:
    """Count a bracket's trials among the first `total` trials. The count is cached, because each decision needs it."""
    return sum(map(holds, range(total)))


class Hyperband(SweepRule):
    """Distribute the trials of a sweep among brackets.

    Bracket s has the last s + 1 of the milestones. A trial's number determines its bracket, so that later trials do not
    change the brackets of earlier ones. The finalists are the best of all brackets at the last milestone.

    Args:
        halving: The milestones, the reduction factor and the mode of the longest bracket.

    Attributes:
        sizes: `sizes[s]` is the number of trials of bracket s in a full round (n in Algorithm 1).

    >>> Hyperband(SuccessiveHalving((1, 3, 9), 3, "min")).sizes
    (3, 5, 9)
    """

    def __init__(self, halving: SuccessiveHalving) -> None:
        check_is("halving", halving, SuccessiveHalving)
        stops, eta = halving.milestones, halving.reduction_factor
        count = len(stops)
        self.sizes = tuple(math.ceil(count * eta**s / (s + 1)) for s in range(count))
        self._round = _spread(self.sizes)
        self._brackets = [
            Bracket(
                SuccessiveHalving(stops[-s - 1 :], eta, halving.mode), partial(_is_in, s, self._round), to_the_end=True
            )
            for s in range(count)
        ]

    def bracket_of(self, number: int) -> int:
        """Return the number s of a trial's bracket."""
        return self._round[number % len(self._round)]

    def admit(self, sweep: SweepState) -> int:
        """Return how many configurations to admit: all that are left, once earlier ones passed their first rung."""
        return min(bracket.admit(sweep) for bracket in self._brackets)

    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        moves: dict[int, Move] = {}
        for bracket in self._brackets:
            moves |= bracket.decide(sweep)
        return moves

    def epochs(self, sweep: SweepState) -> int:
        return sum(bracket.epochs(sweep) for bracket in self._brackets)


def _is_in(s: int, round_: tuple[int, ...], number: int) -> bool:
    return round_[number % len(round_)] == s


def _spread(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bracket of each position in a round, in which bracket s has `sizes[s]` trials.

    Each prefix of the round has about its share of the trials of each bracket.

    >>> _spread((1, 1, 2))
    (2, 0, 1, 2)
    """
    total, counts = sum(sizes), [0] * len(sizes)
    found: list[int] = []
    for place in range(1, total + 1):
        missing = [size * place / total - count for size, count in zip(sizes, counts)]
        found.append(s := max(range(len(sizes)), key=missing.__getitem__))
        counts[s] += 1
    return tuple(found)
