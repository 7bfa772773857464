from __future__ import annotations

from hydro_rasda.contracts import Group, Outcome, Span, Task, full_size_task, group_key
from hydro_rasda.training.retry_policy import Deaths

SPAN = Span(1, 3)


def task(*groups: tuple[int, ...]) -> Task:
    those = tuple(Group("a kind", members, fused=True) for members in groups)
    return Task(group_key("sweep", SPAN, groups[0]), those, ("a source",), SPAN)


def tried(killers: set[int], whole: Task) -> tuple[list[tuple[int, ...]], dict[int, str]]:
    """What is trained, in turn, and what fails, where some trials kill each process that trains them."""
    deaths, left, trained, failures = Deaths(), [whole], list[tuple[int, ...]](), dict[int, str]()
    while left:
        at = left.pop(0)
        trained.append(at.members)
        assert at.sources == whole.sources
        if killers & set(at.members):
            following = deaths.of(at, "SIGKILL")
            if isinstance(following, Outcome):
                failures |= following.failures
            else:
                left = following + left
    return trained, failures


def test_a_task_is_tried_twice_then_in_halves_each_twice_again() -> None:
    trained, failures = tried({2}, task((0, 1, 2)))
    assert trained == [(0, 1, 2)] * 2 + [(0, 1)] + [(2,)] * 2
    assert failures == {2: "the process that trained it died 2 times: SIGKILL"}


def test_groups_that_shared_a_process_are_parted_before_they_are_halved() -> None:
    trained, failures = tried({0, 3}, task((0, 1), (2, 3)))
    first, second = [(0, 1)] * 2 + [(0,)] * 2 + [(1,)], [(2, 3)] * 2 + [(2,)] + [(3,)] * 2
    assert trained == [(0, 1, 2, 3)] * 2 + first + second
    assert failures.keys() == {0, 3}


def test_parts_are_units_of_their_own() -> None:
    parts = task((0, 1), (2, 3)).smaller()
    assert [part.key for part in parts] == [group_key("sweep", SPAN, (0, 1)), group_key("sweep", SPAN, (2, 3))]


def test_a_full_size_model_is_tried_twice() -> None:
    deaths, target = Deaths(), full_size_task("a key", 7, SPAN, None, 0)
    assert deaths.of(target, "SIGKILL") == [target]
    outcome = deaths.of(target, "SIGKILL")
    assert isinstance(outcome, Outcome)
    assert outcome.error == "the process that trained it died 2 times: SIGKILL"
