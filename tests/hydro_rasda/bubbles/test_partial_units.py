"""Pieces of full-size trainings, as guests give them: when one is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hydro_rasda import RaceConfig, TuneResult, Worker
from hydro_rasda.bubbles import BubbleBackend
from hydro_rasda.bubbles.partial_units import GroupWork, TargetWork
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.contracts import Group, History, Outcome, Span, Task, full_size_task, group_key
from hydro_rasda.problem.problem import OwnLoop, Problem
from hydro_rasda.run.state import Run
from hydro_rasda.training.retry_policy import Deaths
from tests.hydro_rasda.models import mlp
from tests.hydro_rasda.scripted import open_run
from tests.hydro_rasda.training.test_user_loop import at_full_size

TASK = full_size_task("race/trial-0/to-4", 0, Span(0, 4), None, 0, 1)


@pytest.fixture
def run(problem: Problem, tmp_path: Path) -> Iterator[Run]:
    opened = open_run(tmp_path / "run", problem.with_settings(stop_at=0.1), 1)
    yield opened
    opened.store.close()


def given(task: Task, epochs: Mapping[int, float], ended: bool = False) -> Outcome:
    history = [(epoch, {"val_loss": score}) for epoch, score in epochs.items()]
    return Outcome.of_model(task.number, {"model": {}}, history, 1.0, ended=ended)


@pytest.mark.parametrize(
    ("last", "over"),
    [
        (given(TASK, {}, ended=True), True),
        (given(TASK, {3: 0.5}, ended=True), True),
        (given(TASK, {3: 0.05}), True),
        (given(TASK, {3: float("nan")}), True),
        (given(TASK, {3: 0.5}), False),
    ],
    ids=["ended before", "ended", "good enough", "diverged", "goes on"],
)
def test_a_training_that_is_over_before_its_milestone_is_done(run: Run, last: Outcome, over: bool) -> None:
    """Without patience left it may have no epoch to give; a training function need not report a `train_loss`."""
    work = TargetWork(run, TASK, 1)
    assert list(work.begin()) == [TASK]
    (rest,) = work.took(TASK, given(TASK, {1: 0.7, 2: 0.6}), go_on=True)
    assert rest.span == Span(2, 4)
    left = work.took(rest, last, go_on=True)
    assert (work.done, not left) == (over, over)
    if over:
        assert work.outcome.ended == last.ended
        assert [epoch for epoch, _ in work.outcome.epochs] == [1, 2, *(epoch for epoch, _ in last.epochs)]


def test_trials_whose_guests_die_again_and_again_fail_one_by_one(run: Run) -> None:
    """The group is tried again, then halved, until each of them is alone."""
    task = Task("sweep/to-2/group-0", (Group("a", (0, 1), True),), (), Span(0, 2))
    work, deaths = GroupWork(run, task, 1), Deaths()
    left = [*work.begin()]
    while left:
        left += work.died(left.pop(), "signal 9", deaths)
    assert work.done
    assert work.outcome.history == {0: [], 1: []}
    assert [*sorted(work.outcome.failures)] == [0, 1]
    assert all("signal 9" in error for error in work.outcome.failures.values())


def lines(numbers: Sequence[int], epochs: Iterable[int], loss: float = 1.0) -> dict[int, History]:
    return {n: [(epoch, {"train_loss": loss, "val_loss": n + epoch}) for epoch in epochs] for n in numbers}


@pytest.mark.parametrize(("heat", "width"), [("sweep", None), ("middle", 1 / 4)])
def test_a_group_goes_on_from_what_guests_left_of_it_in_this_process_or_the_next(
    run: Run, heat: HeatName, width: float | None
) -> None:
    task = Task("a key", (Group("a", (0, 1, 2), True),), ("before",), Span(1, 4), heat, width)
    work = GroupWork(run, task, 1)
    assert list(work.begin()) == [task]
    assert not work.done
    # A guest leaves after an epoch; one trial has failed by then.
    kept = [{"members": [0, 1], "model": 1}]
    found = Outcome(kept, lines([0, 1, 2], [2]) | {2: []}, {2: "raised"})
    (rest,) = work.took(task, found, go_on=True)
    key = group_key(heat, task.span, (0, 1, 2)) + "/so-far-of-3"
    assert (rest.members, rest.span, rest.sources, rest.heat, rest.width) == ((0, 1), Span(2, 4), (key,), heat, width)
    assert rest.key == group_key(heat, Span(2, 4), (0, 1))
    assert work.saved == [key]
    # The process ends here. The next one reads the same rest.
    again = GroupWork(run, task, 1)
    assert [*again.begin()] == [rest]
    for each in (work, again):
        part = {"members": [0, 1], "model": 2}
        assert not each.done
        assert not each.took(rest, Outcome([part], lines([0, 1], [3, 4]), {}), go_on=True)
        assert each.done
        assert each.outcome.checkpoint == [part]
        assert each.outcome.history == lines([0, 1], [2, 3, 4]) | {2: []}
        assert each.outcome.failures == {2: "raised"}
    other = replace(task, groups=(Group("a", (0, 3, 4), True),), sources=())
    assert [*GroupWork(run, other, 1).begin()] == [other], "a rest of other members is not theirs"


@pytest.mark.parametrize("members", [(0, 1), (0,)])
def test_what_has_diverged_or_may_not_go_on_is_over(members: tuple[int, ...], run: Run) -> None:
    task = Task("sweep/to-4/group-0", (Group("a", members, True),), (), Span(0, 4))
    part = {"members": [*members]}
    for loss, go_on, over in ((math.nan, True, True), (1.0, False, True), (1.0, True, False)):
        work = GroupWork(run, task, 1)
        list(work.begin())
        left = work.took(task, Outcome([part], lines([*members], [1, 2], loss), {}), go_on)
        assert (work.done, not left, work.outcome.checkpoint == [part]) == (over, over, over)
        run.store.discard(work.saved)


def test_a_piece_that_is_given_up_leaves_what_it_had(run: Run) -> None:
    task = Task("sweep/to-4/group-0", (Group("a", (0, 1), True),), (), Span(0, 4))
    work, part = GroupWork(run, task, 1), {"members": [0, 1], "model": 1}
    list(work.begin())
    (rest,) = work.took(task, Outcome([part], lines([0, 1], [1]), {}), go_on=True)
    work.give_up(rest)
    assert work.done
    assert (work.outcome.checkpoint, work.outcome.history) == ([part], lines([0, 1], [1]))
    run.store.discard(work.saved)
    unbegun = GroupWork(run, task, 1)
    unbegun.give_up(*unbegun.begin())
    assert unbegun.done
    assert (unbegun.outcome.checkpoint, unbegun.outcome.history) == ([], {})


def test_a_full_size_model_goes_on_or_is_given_up_with_what_it_had(run: Run) -> None:
    work = TargetWork(run, TASK, 1)
    list(work.begin())
    (rest,) = work.took(TASK, given(TASK, {1: 0.7, 2: 0.6}), go_on=True)
    assert (rest.source, work.saved) == ("race/trial-0/to-4/so-far", ["race/trial-0/to-4/so-far"])
    again = TargetWork(run, TASK, 1)
    assert [*again.begin()] == [rest]
    again.give_up(rest)
    assert again.done
    assert (again.outcome.state, [epoch for epoch, _ in again.outcome.epochs]) == ({"model": {}}, [1, 2])
    assert not work.took(rest, given(TASK, {3: 0.5, 4: 0.4}), go_on=True)
    assert work.outcome.seconds == 2.0
    assert [epoch for epoch, _ in work.outcome.epochs] == [1, 2, 3, 4]
    run.store.discard(work.saved)
    failed = TargetWork(run, TASK, 1)
    list(failed.begin())
    failed.took(TASK, Outcome.failed(0, "raised"), go_on=True)
    assert (failed.outcome.error, failed.outcome.epochs) == ("raised", [])
    unbegun = TargetWork(run, TASK, 1)
    unbegun.give_up(*unbegun.begin())
    assert (unbegun.done, unbegun.outcome.history) == (True, {})


def test_a_full_size_model_whose_guests_die_is_tried_twice(run: Run) -> None:
    work, deaths = TargetWork(run, TASK, 1), Deaths()
    list(work.begin())
    assert [*work.died(TASK, "signal 9", deaths)] == [TASK]
    assert not work.done
    assert not work.died(TASK, "signal 9", deaths)
    assert work.done
    assert "signal 9" in str(work.outcome.error)


def test_a_training_function_that_returns_early_ends_its_trial(
    quick: Callable[..., TuneResult], two_hosts: Path
) -> None:
    def full_size(worker: Worker) -> None:
        worker.report({"val_loss": 0.5}, {"model": mlp(dict(worker.config)).state_dict()})

    race = RaceConfig(grace_period=3)
    result = quick(num_samples=2, max_t=3, race=race, backend=BubbleBackend(two_hosts), **at_full_size(full_size))
    assert result.finished
    assert {record.epochs for record in result.trials} <= {0, 1}


@pytest.mark.parametrize(("score", "over"), [(math.nan, True), (0.05, True), (0.5, False)])
def test_a_loop_of_the_users_own_is_over_where_its_worker_left_it(run: Run, score: float, over: bool) -> None:
    """At full width, a score that is good enough ends a sweep's training, too. The training loss does not matter."""
    own = replace(run.problem, own_loop=OwnLoop(print, None, sweeps=True))
    run.problem = own.with_settings(sweep=replace(own.settings.sweep, surrogate=1))
    history = [(1, {"train_loss": 1.0, "val_loss": score})]
    group = GroupWork(run, Task("sweep/to-4/group-0", (Group("a", (0,), False),), (), Span(0, 4)), 1)
    full_size = TargetWork(run, TASK, 1)
    for work in (group, full_size):
        list(work.begin())
        left = work.took(work.task, Outcome.of_model(0, {"model": {}}, history, 1.0), go_on=True)
        assert (work.done, not left) == (over, over)
        run.store.discard(work.saved)
