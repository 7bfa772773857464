"""Which trials a device trains next, in which fused groups: pure functions of what waits and of what was measured."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .forks import evenly
from .fused import Group


@dataclass(frozen=True)
class Widths:
    """How to group the trials of one kind.

    Attributes:
        most: Members of the largest group; 1 where fusing never pays.
        least: Members from which a group trains faster as one than one after another.
        throughput: Steps of a trial per second, by width, as far as measured; at 1: one after another.
    """

    most: int
    least: int = 2
    throughput: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})

    @property
    def rate(self) -> float:
        """Steps of a trial per second, in the largest groups."""
        return self.throughput.get(self.most, self.throughput[1])

    def seconds(self, members: int) -> float:
        """Of a step of a group, between measured widths in proportion.

        >>> widths = Widths(4, 3, {1: 100.0, 4: 200.0})
        >>> widths.seconds(2), widths.seconds(3), widths.seconds(4)
        (0.02, 0.0166..., 0.02)
        """
        if members < self.least:
            return members / self.throughput[1]
        known = sorted(self.throughput)
        at = bisect.bisect_left(known, members)
        if at == len(known):
            return members / self.throughput[known[-1]]
        above, below = known[at], known[max(0, at - 1)]
        slow, quick = above / self.throughput[above], below / self.throughput[below]
        return slow if above == below else quick + (slow - quick) * (members - below) / (above - below)


@dataclass(frozen=True)
class Waiting:
    """Trials of one kind that wait for a device.

    Attributes:
        trials: Their numbers; groups keep this order.
        widths: How to group them.
        steps: Of an epoch.
    """

    trials: Sequence[int]
    widths: Widths
    steps: float = 1.0

    def seconds(self, members: int) -> float:
        """Of an epoch of a group."""
        return self.steps * self.widths.seconds(members)


Round = Mapping[str, Sequence[Sequence[int]]]
"""Of each kind, the groups that train beside each other: the first of its trials."""

Rule = Callable[[Mapping[str, Waiting], int], Round]


def next_groups(waiting: Mapping[str, Waiting], cores: int = 1, share: float = 1.0) -> list[Group]:
    """What a device trains next: one group, or as many as it has cores.

    Groups of one kind on all cores are equally large, and done at the same time. Of small models, though, a wide group
    takes hardly longer than a narrow one: then each kind has a core to itself. What is measured tells which it is.

    Args:
        waiting: By kind, of which that of the first trial comes first.
        cores: Groups that the device trains beside each other.
        share: Of all that wait, what it may take at most: the rest is for other free devices.

    >>> waiting = {"a": Waiting([0, 2, 3, 4], Widths(4)), "b": Waiting([1, 5], Widths(4))}
    >>> [group.members for group in next_groups(waiting)], [group.members for group in next_groups(waiting, share=0.5)]
    ([(0, 2, 3, 4)], [(0, 2, 3)])
    >>> [group.members for group in next_groups(waiting, cores=2)]
    [(0, 2), (3, 4)]
    >>> alike = Widths(4, 2, {1: 1.0, 4: 4.0})
    >>> waiting = {kind: Waiting(of.trials, alike) for kind, of in waiting.items()}
    >>> [group.members for group in next_groups(waiting, cores=2)]
    [(0, 2, 3, 4), (1, 5)]
    """
    free = math.ceil(share * sum(len(of.trials) for of in waiting.values()))
    rule = min((_apart, _together), key=lambda rule: _seconds(rule, waiting, cores)) if cores > 1 else _apart
    groups = []
    for kind, parts in rule(waiting, cores).items():
        for part in parts:
            members = tuple(part[:free])
            free -= len(members)
            if members:
                groups.append(Group(kind, members, fused=len(members) >= waiting[kind].widths.least))
    return groups


def _apart(waiting: Mapping[str, Waiting], cores: int) -> Round:
    """The first kind on all cores."""
    return _first_of({next(iter(waiting)): cores}, waiting)


def _together(waiting: Mapping[str, Waiting], cores: int) -> Round:
    """The kinds that take longest, each on a core; where cores are left, on more."""

    def seconds(kind: str, parts: int) -> float:
        of = waiting[kind]
        return of.seconds(min(of.widths.most, math.ceil(len(of.trials) / parts)))

    longest = sorted(waiting, key=lambda kind: seconds(kind, 1), reverse=True)[:cores]
    parts = dict.fromkeys(longest, 1)
    for _ in range(cores - len(parts)):
        kind = max(parts, key=lambda kind: seconds(kind, parts[kind]))
        parts[kind] += 1
    return _first_of(parts, waiting)


def _first_of(parts: Mapping[str, int], waiting: Mapping[str, Waiting]) -> Round:
    """The first of the rounds that kinds take on so many cores each, groups of a kind equally large."""
    found = {}
    for kind, count in parts.items():
        trials, most = waiting[kind].trials, waiting[kind].widths.most
        rounds = math.ceil(len(trials) / (most * count))
        found[kind] = evenly(trials, rounds * count)[:count]
    return found


def _seconds(rule: Rule, waiting: Mapping[str, Waiting], cores: int) -> float:
    """An epoch of all that wait, in rounds by a rule."""
    total = 0.0
    while waiting:
        next_round = rule(waiting, cores)
        total += max(waiting[kind].seconds(len(part)) for kind, parts in next_round.items() for part in parts)
        waiting = {kind: _without(of, next_round.get(kind, ())) for kind, of in waiting.items()}
        waiting = {kind: of for kind, of in waiting.items() if of.trials}
    return total


def _without(of: Waiting, parts: Sequence[Sequence[int]]) -> Waiting:
    return replace(of, trials=of.trials[sum(len(part) for part in parts) :])
