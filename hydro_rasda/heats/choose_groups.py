"""Choose the trials that a device trains next, and group them: pure functions of the queue and measured speeds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hydro_rasda.contracts import Group, Widths
from hydro_rasda.schedulers.packing_policy import SLACK


@dataclass(frozen=True)
class WaitingKind:
    """Trials of one kind that wait for a device. Trials of one kind can be fused.

    Attributes:
        trials: Numbers of the trials; groups keep this order.
        steps: Number of optimizer steps in an epoch.
    """

    trials: Sequence[int]
    widths: Widths
    steps: float = 1.0
    _seconds: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def seconds(self, members: int) -> float:
        if members not in self._seconds:
            self._seconds[members] = self.steps * self.widths.seconds(members)
        return self._seconds[members]


Round = Mapping[str, Sequence[int]]
"""Maps each kind to the sizes of its groups that train side by side. The groups take the first trials of the kind."""


def next_groups(waiting: Mapping[str, WaitingKind], cores: int = 1, share: float = 1.0) -> list[Group]:
    """Choose the next groups of a device: one group, or as many as the device has cores.

    Normally, all cores train equally large groups of one kind, which end at the same time. For small models, a group of
    many members takes hardly longer than a group of a few. Then it can be faster to give each kind one core. The
    measured speeds decide between the two plans.

    Args:
        waiting: Waiting trials by kind. The first kind is that of the first trial in the queue.
        cores: Number of groups that the device trains at the same time.
        share: The largest share of all waiting trials that the device may take. The rest is for other idle devices.

    >>> waiting = {"a": WaitingKind([0, 2, 3, 4], Widths(4)), "b": WaitingKind([1, 5], Widths(4))}
    >>> [group.members for group in next_groups(waiting)], [group.members for group in next_groups(waiting, share=0.5)]
    ([(0, 2, 3, 4)], [(0, 2, 3)])
    >>> [group.members for group in next_groups(waiting, cores=2)]
    [(0, 2), (3, 4)]
    >>> alike = Widths(4, 2, {1: 1.0, 4: 4.0})
    >>> waiting = {kind: WaitingKind(of.trials, alike) for kind, of in waiting.items()}
    >>> [group.members for group in next_groups(waiting, cores=2)]
    [(0, 2, 3, 4), (1, 5)]
    """
    free = math.ceil(share * sum(len(of.trials) for of in waiting.values()))
    groups = []
    for kind, sizes in _next_round(waiting, cores).items():
        of, first = waiting[kind], 0
        for size in sizes:
            members = tuple(of.trials[first : first + min(size, free)])
            first, free = first + size, free - len(members)
            if members:
                groups.append(Group(kind, members, fused=len(members) >= of.widths.least))
    return groups


def _next_round(waiting: Mapping[str, WaitingKind], cores: int) -> Round:
    """Choose the plan that trains an epoch of all trials faster, and return its first round.

    One plan gives all cores to one kind after the other. The other plan gives one core to each of several kinds.
    """
    first = next(iter(waiting))
    parts = {first: _beside(waiting[first], cores)}
    if len(waiting) > 1 and cores > 1:
        parts = _together(waiting, cores, _seconds_apart(waiting, cores)) or parts
    return {kind: _sizes(len(waiting[kind].trials), waiting[kind].widths.most, of) for kind, of in parts.items()}


def _sizes(trials: int, most: int, parts: int) -> list[int]:
    """Split the trials of a kind into as few rounds as possible. Return the sizes of the groups of the first round.

    A round has up to `parts` groups, which train side by side. A group has at most `most` trials. The sizes of all
    groups differ by at most one.

    >>> _sizes(10, most=4, parts=2), _sizes(8, most=4, parts=2), _sizes(3, most=4, parts=8)
    ([3, 2], [4, 4], [1, 1, 1])
    """
    groups = min(trials, parts * math.ceil(trials / (most * parts)))
    bounds = [-(-trials * i // groups) for i in range(min(parts, groups) + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def _beside(of: WaitingKind, cores: int) -> int:
    """Return how many groups of a kind can train side by side, one on each core, without exceeding the memory."""
    share = of.widths.share
    return cores if share * cores <= 1 + SLACK else max(1, int(1 / share + SLACK))


def _round(trials: int, most: int, parts: int) -> tuple[int, int, int]:
    """Return the largest, the smallest and the sum of the sizes that `_sizes` returns, without building the list.

    >>> _round(10, most=4, parts=2), _round(8, most=4, parts=2)
    ((3, 2, 5), (4, 4, 8))
    """
    groups = min(trials, parts * -(-trials // (most * parts)))
    largest, taken = -(-trials // groups), -(-trials * min(parts, groups) // groups)
    return largest, largest - (taken < largest * min(parts, groups)), taken


def _seconds_apart(waiting: Mapping[str, WaitingKind], cores: int) -> float:
    """Return the seconds of one epoch of all trials if the kinds train one after the other, each on all cores."""
    total = 0.0
    for of in waiting.values():
        left, most, parts = len(of.trials), of.widths.most, _beside(of, cores)
        while left:
            largest, smallest, taken = _round(left, most, parts)
            total += max(of.seconds(largest), of.seconds(smallest))
            left -= taken
    return total


def _together(waiting: Mapping[str, WaitingKind], cores: int, limit: float) -> dict[str, int]:
    """Return how many cores each kind gets in the first of the rounds that `_Together` plans.

    Return an empty dict if these rounds take `limit` seconds or more for one epoch of all trials.
    """
    rounds, total = _Together(waiting, cores), 0.0
    first = parts = rounds.begin()
    while parts and total < limit:
        total += rounds.train(parts)
        parts = rounds.begin()
    return first if total < limit else {}


class _Together:
    """Plan rounds in which each of the slowest kinds has one core. Each core that is left goes to the slowest of them.

    A kind that does not fit into memory beside slower kinds waits for a later round.
    """

    def __init__(self, waiting: Mapping[str, WaitingKind], cores: int) -> None:
        self._cores, self._waiting = cores, waiting
        self._most = {kind: of.widths.most for kind, of in waiting.items()}
        self._shares = {kind: of.widths.share for kind, of in waiting.items()}
        self._least = min(self._shares.values())
        self._left = {kind: len(of.trials) for kind, of in waiting.items()}
        # The slowest kind comes first; ties keep the order in which the kinds were given.
        self._places = {kind: place for place, kind in enumerate(waiting)}
        self._longest = [(-self._group_seconds(kind, 1), place, kind) for kind, place in self._places.items()]
        heapq.heapify(self._longest)

    def _group_seconds(self, kind: str, parts: int) -> float:
        return self._waiting[kind].seconds(min(self._most[kind], -(-self._left[kind] // parts)))

    def begin(self) -> dict[str, int]:
        """Return the kinds of the next round, each with its number of cores; an empty dict if no trials are left."""
        parts, room = dict[str, int](), 1 + SLACK
        wait = []
        while self._longest and len(parts) < self._cores and (not parts or self._least <= room):
            entry = heapq.heappop(self._longest)
            kind = entry[-1]
            if parts and self._shares[kind] > room:
                wait.append(entry)
                continue
            parts[kind] = 1
            room -= self._shares[kind]
        for entry in wait:
            heapq.heappush(self._longest, entry)
        for _ in range(self._cores - len(parts) if parts else 0):
            kind = max(parts, key=lambda kind: self._group_seconds(kind, parts[kind]))
            if self._shares[kind] > room:
                break
            parts[kind] += 1
            room -= self._shares[kind]
        return parts

    def train(self, parts: Mapping[str, int]) -> float:
        """Count the trials of a round from `begin` as trained. Return the seconds that an epoch of the round takes."""
        longest = 0.0
        for kind, count in parts.items():
            largest, smallest, taken = _round(self._left[kind], self._most[kind], count)
            of = self._waiting[kind]
            longest = max(longest, of.seconds(largest), of.seconds(smallest))
            self._left[kind] -= taken
            if self._left[kind]:
                heapq.heappush(self._longest, (-self._group_seconds(kind, 1), self._places[kind], kind))
        return longest
