"""Successive halving over several devices: no device waits while a trial can go on.

Synchronous halving decides a rung when all of its trials are there, and devices stand idle until the last of them is.
Here, a device may find no trial left to begin. It then takes a trial that is already among the best `1 / rf` of those
that reached the rung (ASHA's promotion: Li et al. 2020, Algorithm 2). With one device, nothing trains during a
decision, and the decisions are those of synchronous halving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from hydro_rasda.schedulers.halving import SuccessiveHalving
from hydro_rasda.schedulers.sweep_rule import Continue, Move, Stop, SweepRule
from hydro_rasda.schedulers.sweep_state import Standing, SweepState

T = TypeVar("T")


class Bracket(SweepRule):
    """The rungs of successive halving: the rule that `tune` sweeps by unless it is given another.

    Args:
        halving: Decides a rung; its `keep_at_least` is how many finalists are wanted. The sweep's mode counts, not its
            own: places among several metrics are better the lower they are, whatever the mode of a metric.
        holds: Tells by a trial's number whether the trial is in this bracket; None for a bracket of all trials.
        to_the_end: If true, the best trials train to the last milestone, however few are left. Otherwise the last rung
            is the one that leaves at most `keep_at_least`.
    """

    def __init__(
        self, halving: SuccessiveHalving, holds: Callable[[int], bool] | None = None, to_the_end: bool = False
    ) -> None:
        self._halving, self._holds, self._to_the_end = halving, holds, to_the_end

    def admit(self, sweep: SweepState) -> int:
        """Admit all configurations that there are, once the earlier ones have passed the first rung."""
        first = self._halving.milestones[0]
        return 0 if self._waiting_at(0, sweep) or self._training_to(first, sweep) else sweep.left

    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        """Decide the lowest undecided rung, once all of its trials are there.

        If a device has nothing to do before that, the best continue early.
        """
        stops = self._milestones(sweep)
        if new := self._waiting_at(0, sweep):
            return {number: Continue(stops[0]) for number in new}
        there = (stop for stop in stops if self._training_to(stop, sweep) or self._waiting_at(stop, sweep))
        lowest = next(there, None)
        if lowest is not None and not sweep.left and not self._training_to(lowest, sweep):
            return self._decided(lowest, stops, sweep)
        return self._early(stops, sweep) if sweep.idle else {}

    def _decided(self, stop: int, stops: Sequence[int], sweep: SweepState) -> dict[int, Move]:
        """Let the best trials of a rung continue, and stop the others; trials kept at the last rung stay there."""
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
        """From the lowest rung on which there are any, those that are among the best of all that could still come."""
        for stop, above in pairwise(stops):
            waiting = self._waiting_at(stop, sweep)
            promoted = self._promoted(stop, sweep, complete=False) if waiting else ()
            if found := [number for number in promoted if number in waiting]:
                return {number: Continue(above) for number in found}
        return {}

    def finalists(self, sweep: SweepState) -> Sequence[int]:
        """The best of the rung that leaves no more than are wanted."""
        stops = self._milestones(sweep)
        for stop in stops:
            kept = self._promoted(stop, sweep)
            if self._is_last(stop, kept, stops):
                break
        return kept[: self._halving.keep_at_least]

    def epochs(self, sweep: SweepState) -> int:
        return sum(size * epochs for size, epochs in self.rungs(sweep))

    def rungs(self, sweep: SweepState) -> list[tuple[int, int]]:
        """Return for each rung the number of trials expected, and the epochs that each of them trains for it."""
        spans = pairwise((0, *self._halving.milestones))
        return [(size, stop - start) for size, (start, stop) in zip(self._sizes(sweep), spans)]

    def _waiting_at(self, stop: int, sweep: SweepState) -> Mapping[int, Standing]:
        return self._own(sweep.waiting_at(stop))

    def _training_to(self, stop: int, sweep: SweepState) -> Mapping[int, Standing]:
        return self._own(sweep.training_to(stop))

    def _promoted(self, stop: int, sweep: SweepState, complete: bool = True) -> tuple[int, ...]:
        halving = replace(self._halving, mode=sweep.mode)
        return halving.promote(self._own(sweep.scores.get(stop, {})), complete=complete)

    def _own(self, by_number: Mapping[int, T]) -> Mapping[int, T]:
        if self._holds is None:
            return by_number
        return {number: of for number, of in by_number.items() if self._holds(number)}

    def _is_last(self, stop: int, kept: Sequence[int], stops: Sequence[int]) -> bool:
        few = len(kept) <= self._halving.keep_at_least and not self._to_the_end
        return few or stop == stops[-1]

    def _milestones(self, sweep: SweepState) -> tuple[int, ...]:
        """Those of the rungs that are needed, to the one whose decision leaves the finalists."""
        return tuple(self._halving.milestones[: len(self._sizes(sweep))])

    def _sizes(self, sweep: SweepState) -> list[int]:
        """Trials expected on each of these rungs."""
        keep, total = self._halving.keep_at_least, len(sweep.trials) + sweep.left
        sizes = [total if self._holds is None else sum(map(self._holds, range(total)))]
        while len(sizes) < len(self._halving.milestones):
            following = sizes[-1] // self._halving.reduction_factor
            if following <= keep and not self._to_the_end:
                break
            sizes.append(max(following, min(keep, sizes[-1])))
        return sizes
