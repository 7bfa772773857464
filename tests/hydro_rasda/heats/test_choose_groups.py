from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from hydro_rasda.contracts import Group, Widths, evenly
from hydro_rasda.heats.choose_groups import WaitingKind, next_groups

BOUND = Widths(16, 2, {1: 1.0, 16: 1.0})
"""Models for which fusing gains nothing: a group takes as long as its members one after another."""

FREE = Widths(16, 2, {1: 1.0, 16: 16.0})
"""Models so small that a group of 16 takes as long as one of them."""


def rounds(
    counts: Mapping[str, int], widths: Mapping[str, Widths], cores: int, steps: Mapping[str, float] | None = None
) -> list[list[Group]]:
    """What a device trains until nothing waits; trials are numbered through, kind by kind."""
    waiting, first = dict[str, Sequence[int]](), 0
    for kind, count in counts.items():
        waiting[kind], first = range(first, first + count), first + count
    found = []
    while waiting:
        asked = {kind: WaitingKind(list(n), widths[kind], (steps or {}).get(kind, 1.0)) for kind, n in waiting.items()}
        found.append(next_groups(asked, cores))
        taken = {n for group in found[-1] for n in group.members}
        assert taken
        waiting = {kind: [n for n in numbers if n not in taken] for kind, numbers in waiting.items()}
        waiting = {kind: numbers for kind, numbers in waiting.items() if numbers}
    return found


def sizes(found: Sequence[Sequence[Group]]) -> list[list[tuple[str, int]]]:
    return [[(group.kind, len(group.members)) for group in groups] for groups in found]


def test_groups_are_of_one_kind_and_even() -> None:
    found = rounds({"a": 5, "b": 5}, {"a": Widths(3), "b": Widths(8)}, cores=1)
    assert [[group.members for group in groups] for groups in found] == [[(0, 1, 2)], [(3, 4)], [(5, 6, 7, 8, 9)]]


def test_groups_keep_the_order_that_they_are_given() -> None:
    (group,) = next_groups({"a": WaitingKind([3, 0, 2, 1], Widths(4))})
    assert group.members == (3, 0, 2, 1)


def test_small_groups_train_one_by_one() -> None:
    found = rounds({"a": 5}, {"a": Widths(4, least=3)}, cores=1)
    assert [(group.members, group.fused) for (group,) in found] == [((0, 1, 2), True), ((3, 4), False)]


def test_a_share_is_of_all_that_wait() -> None:
    waiting = {"a": WaitingKind([0, 1, 2, 3, 4, 5], Widths(8)), "b": WaitingKind([6, 7], Widths(8))}
    (group,) = next_groups(waiting, share=0.25)
    assert group.members == (0, 1)
    assert [g.members for g in next_groups(waiting, cores=2, share=0.25)] == [(0, 1)]


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_what_fusing_does_not_help_is_split_over_all_cores(cores: int) -> None:
    found = sizes(rounds({"a": 12, "b": 12}, {"a": BOUND, "b": BOUND}, cores, {"a": 3.0, "b": 1.0}))
    assert found == [[("a", 12 // cores)] * cores, [("b", 12 // cores)] * cores]


def test_kinds_that_a_wide_group_costs_nothing_have_a_core_each() -> None:
    found = sizes(rounds({"a": 12, "b": 12}, {"a": FREE, "b": FREE}, cores=2))
    assert found == [[("a", 12), ("b", 12)]]
    found = sizes(rounds({"a": 12, "b": 12, "c": 12}, dict.fromkeys("abc", FREE), 2, {"a": 1.0, "b": 5.0, "c": 5.0}))
    assert found[0] == [("b", 12), ("c", 12)]  # the two that take as long as each other
    assert {kind for kind, _ in found[1]} == {"a"}


def test_cores_that_are_left_go_to_what_takes_longest() -> None:
    found = sizes(rounds({"a": 4, "b": 6}, {"a": FREE, "b": BOUND}, cores=4))
    assert found == [[("b", 2), ("b", 2), ("b", 2), ("a", 4)]]


def test_no_group_is_wider_than_fits() -> None:
    for cores in (1, 2, 5):
        found = rounds({"a": 40, "b": 3}, {"a": BOUND, "b": FREE}, cores)
        assert max(len(group.members) for groups in found for group in groups) <= 16
        assert sorted(n for groups in found for group in groups for n in group.members) == list(range(43))
        assert all(len(groups) <= cores for groups in found)


def test_more_cores_than_trials() -> None:
    assert sizes(rounds({"a": 3}, {"a": BOUND}, cores=8)) == [[("a", 1)] * 3]


def test_seconds_of_a_step_lie_between_what_was_measured() -> None:
    widths = Widths(8, 3, {1: 100.0, 4: 200.0, 8: 320.0})
    assert widths.rate == 320.0
    assert widths.seconds(1) == pytest.approx(0.01)
    assert widths.seconds(2) == pytest.approx(0.02)  # one after another
    assert widths.seconds(3) == pytest.approx(0.01 + 0.01 * 2 / 3)
    assert widths.seconds(4) == pytest.approx(0.02)
    assert widths.seconds(6) == pytest.approx(0.0225)
    assert widths.seconds(16) == pytest.approx(0.05)


def test_kinds_that_do_not_fit_memory_together_train_in_other_rounds() -> None:
    large, small = Widths(1, share=0.6), Widths(1, share=0.1)
    widths = {"a": large, "b": large, "c": small, "d": small}
    found = rounds(dict.fromkeys(widths, 1), widths, cores=2)
    assert [{group.kind for group in groups} for groups in found] == [{"a", "c"}, {"b", "d"}]
    assert len(rounds({"a": 1, "b": 1}, widths, cores=2)) == 2
    assert sizes(rounds({"a": 4}, {"a": Widths(1, share=0.4)}, cores=4)) == [[("a", 1)] * 2] * 2


def test_memory_that_fits_changes_nothing() -> None:
    counts = {"a": 7, "b": 12, "c": 1, "d": 3}
    for cores in (1, 2, 3):
        plain = {"a": FREE, "b": BOUND, "c": Widths(1), "d": Widths(3)}
        shared = {kind: replace(of, share=1 / cores) for kind, of in plain.items()}
        assert rounds(counts, plain, cores) == rounds(counts, shared, cores)


class Replayed:
    """The same choice by playing all rounds through, trial by trial: slow, and plainly right."""

    def __init__(self, waiting: Mapping[str, WaitingKind], cores: int) -> None:
        self.waiting, self.cores = waiting, cores

    def next_groups(self, share: float) -> list[Group]:
        free = math.ceil(share * sum(len(of.trials) for of in self.waiting.values()))
        way = min((self.apart, self.together), key=self.seconds) if self.cores > 1 else self.apart
        groups = []
        for kind, parts in way(self.waiting).items():
            for part in parts:
                members = tuple(part[:free])
                free -= len(members)
                if members:
                    groups.append(Group(kind, members, fused=len(members) >= self.waiting[kind].widths.least))
        return groups

    def apart(self, waiting: Mapping[str, WaitingKind]) -> dict[str, list[Sequence[int]]]:
        return self.first_round({next(iter(waiting)): self.cores}, waiting)

    def together(self, waiting: Mapping[str, WaitingKind]) -> dict[str, list[Sequence[int]]]:
        def seconds(kind: str, parts: int) -> float:
            of = waiting[kind]
            return of.seconds(min(of.widths.most, math.ceil(len(of.trials) / parts)))

        longest = sorted(waiting, key=lambda kind: seconds(kind, 1), reverse=True)[: self.cores]
        parts = dict.fromkeys(longest, 1)
        for _ in range(self.cores - len(parts)):
            parts[max(parts, key=lambda kind: seconds(kind, parts[kind]))] += 1
        return self.first_round(parts, waiting)

    def first_round(
        self, parts: Mapping[str, int], waiting: Mapping[str, WaitingKind]
    ) -> dict[str, list[Sequence[int]]]:
        found = {}
        for kind, count in parts.items():
            trials, most = waiting[kind].trials, waiting[kind].widths.most
            found[kind] = evenly(trials, count * math.ceil(len(trials) / (most * count)))[:count]
        return found

    def seconds(self, way: Callable[[Mapping[str, WaitingKind]], dict[str, list[Sequence[int]]]]) -> float:
        total, waiting = 0.0, dict(self.waiting)
        while waiting:
            found = way(waiting)
            total += max(waiting[kind].seconds(len(part)) for kind, parts in found.items() for part in parts)
            for kind, parts in found.items():
                waiting[kind] = replace(waiting[kind], trials=waiting[kind].trials[sum(map(len, parts)) :])
            waiting = {kind: of for kind, of in waiting.items() if of.trials}
        return total


def any_waiting(rng: random.Random) -> dict[str, WaitingKind]:
    """A few kinds; measured throughputs rise, fall, or stay as they are."""
    found, first = {}, 0
    for i in range(rng.randint(1, 5)):
        alone = rng.choice([1.0, 100.0])
        gains = {k: rng.choice([0.5, 1.0, 1.5, float(k), rng.uniform(0.3, k)]) for k in (2, 4, 8, 16)}
        throughput = {1: alone} | {k: alone * gain for k, gain in gains.items() if rng.random() < 0.6}
        widths = Widths(rng.choice([1, 3, max(throughput)]), rng.choice([2, 3]), throughput)
        count = rng.randint(1, 40)
        found[str(i)] = WaitingKind(range(first, first + count), widths, rng.choice([1.0, 3.0, 0.1]))
        first += count
    return found


@pytest.mark.parametrize("seed", range(5))
def test_it_chooses_as_if_it_played_all_rounds_through(seed: int) -> None:
    rng = random.Random(seed)
    ways = set()
    for _ in range(60):
        waiting, cores, share = any_waiting(rng), rng.randint(1, 5), rng.choice([1.0, 0.5, 0.3])
        found = next_groups(waiting, cores, share)
        assert found == Replayed(waiting, cores).next_groups(share)
        ways.add(len({group.kind for group in found}) > 1)
    assert ways == {False, True}


def test_thousands_that_wait_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    measured = Widths.seconds

    def counted(self: Widths, members: int) -> float:
        nonlocal asked
        asked += 1
        return measured(self, members)

    monkeypatch.setattr(Widths, "seconds", counted)
    next_groups({kind: WaitingKind(range(1000), replace(FREE, most=8)) for kind in "ab"}, cores=2)
    assert 0 < asked <= 2 * 2 * 8  # at most once for each width of a group
