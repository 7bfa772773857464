from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from hydro_rasda.fused import Group
from hydro_rasda.grouping import Waiting, Widths, next_groups

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
        asked = {kind: Waiting(list(n), widths[kind], (steps or {}).get(kind, 1.0)) for kind, n in waiting.items()}
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
    (group,) = next_groups({"a": Waiting([3, 0, 2, 1], Widths(4))})
    assert group.members == (3, 0, 2, 1)


def test_small_groups_train_one_by_one() -> None:
    found = rounds({"a": 5}, {"a": Widths(4, least=3)}, cores=1)
    assert [(group.members, group.fused) for (group,) in found] == [((0, 1, 2), True), ((3, 4), False)]


def test_a_share_is_of_all_that_wait() -> None:
    waiting = {"a": Waiting([0, 1, 2, 3, 4, 5], Widths(8)), "b": Waiting([6, 7], Widths(8))}
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
