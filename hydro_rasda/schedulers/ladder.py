"""Successive halving over several devices: no device waits while a trial can go on.

Synchronous halving decides a rung when all of its trials are there, and devices stand idle until the last of them is.
Here a device that finds no trial left to begin takes one that is already among the best ``1 / rf`` of those that came
to the rung (ASHA's promotion: Li et al. 2020, Algorithm 2). With one device nothing is ever under way while another
decision is taken, and the decisions are those of synchronous halving.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hydro_rasda.schedulers.halving import SuccessiveHalving
from hydro_rasda.schedulers.ranking import rank


@dataclass
class _Rung:
    start: int
    stop: int
    entered: dict[int, None] = field(default_factory=dict)  # in order of arrival
    begun: set[int] = field(default_factory=set)
    scores: dict[int, float] = field(default_factory=dict)
    decided: bool = False


class Ladder:
    """Which trials stand on which rung, and which a free device is to take.

    The lowest rung that has trials left to begin goes first: what is decided later is decided over more of them.

    Args:
        halving: Decides; its ``keep_at_least`` is how many finalists are wanted.
        expected: Trials that will be admitted.
    """

    def __init__(self, halving: SuccessiveHalving, expected: int) -> None:
        self._halving = halving
        stops = halving.milestones
        self._rungs = [_Rung(start, stop) for start, stop in zip((0, *stops), stops)]
        self._expected = expected
        self._all_admitted = False

    @property
    def epochs(self) -> int:
        """Iterations that all trials together are expected to train."""
        return sum(size * (rung.stop - rung.start) for size, rung in zip(self._sizes(), self._rungs))

    def _sizes(self) -> list[int]:
        """Trials expected on each rung, to the one whose decision leaves the finalists."""
        sizes = [max(self._expected, len(self._rungs[0].entered))]
        while len(sizes) < len(self._rungs):
            following = max(self._halving.keep_at_least, sizes[-1] // self._halving.reduction_factor)
            if following <= self._halving.keep_at_least:
                break
            sizes.append(following)
        return sizes

    def admit(self, trials: Iterable[int]) -> None:
        """New trials, for the first rung."""
        self._rungs[0].entered |= dict.fromkeys(trials)

    def admitted_all(self) -> None:
        """Nothing more will be admitted: the first rung can be decided."""
        self._all_admitted = True
        self._expected = len(self._rungs[0].entered)

    def hungry(self) -> bool:
        """Whether more trials may be admitted, and those that were have all been through the first rung."""
        first = self._rungs[0]
        return not self._all_admitted and first.entered.keys() <= first.scores.keys()

    def waiting(self) -> tuple[int, int, list[int]] | None:
        """What a free device may take: iterations trained before, those trained after, and the trials."""
        for rung, above in zip(self._rungs, [*self._rungs[1 : len(self._sizes())], None]):
            left = [trial for trial in rung.entered if trial not in rung.begun]
            if left:
                return rung.start, rung.stop, left
            if above is None:
                break
            above.entered |= dict.fromkeys(self._halving.promote(rung.scores, complete=False))
        return None

    def begin(self, stop: int, trials: Iterable[int]) -> None:
        """Trials are on their way to a milestone."""
        rung = self._at(stop)
        trials = list(trials)
        rung.entered |= dict.fromkeys(trials)
        rung.begun |= set(trials)

    def reach(self, stop: int, scores: Mapping[int, float]) -> None:
        """Trials came to a milestone; NaN for one that diverged or failed on its way."""
        self.begin(stop, scores)
        self._at(stop).scores |= scores

    def entered(self, stop: int) -> set[int]:
        """Trials that are on their way to a milestone, or there, or wait to be sent."""
        return set(self._at(stop).entered)

    def complete(self) -> tuple[int, dict[int, float]] | None:
        """The lowest rung that can be decided: its milestone, and the scores of all of its trials."""
        open_below = not self._all_admitted
        for rung in self._rungs:
            if not rung.decided:
                ready = not open_below and rung.entered and rung.entered.keys() <= rung.scores.keys()
                return (rung.stop, dict(rung.scores)) if ready else None
            open_below = False
        return None

    def decide(self, stop: int, kept: Iterable[int]) -> bool:
        """Take in a rung's decision; whether the best of those that it kept are the finalists."""
        rung, kept = self._at(stop), list(kept)
        rung.decided = True
        above = self._rungs.index(rung) + 1
        if len(kept) <= self._halving.keep_at_least or above == len(self._sizes()):
            return True
        self._rungs[above].entered |= dict.fromkeys(kept)
        return False

    def best(self, count: int) -> list[int]:
        """The best so far: those who came furthest, then those who are best there."""
        found: dict[int, None] = {}
        diverged = {trial for rung in self._rungs for trial, score in rung.scores.items() if not math.isfinite(score)}
        for rung in reversed(self._rungs):
            trials = sorted(rung.scores.keys() - diverged)
            order = rank([rung.scores[trial] for trial in trials], self._halving.mode)
            found |= dict.fromkeys(trials[i] for i in order if trials[i] not in found)
        return list(found)[:count]

    def above(self, stop: int) -> set[int]:
        """Trials that went on from a milestone, decided or early."""
        i = self._rungs.index(self._at(stop))
        return {trial for rung in self._rungs[i + 1 :] for trial in rung.entered}

    def _at(self, stop: int) -> _Rung:
        return next(rung for rung in self._rungs if rung.stop == stop)
