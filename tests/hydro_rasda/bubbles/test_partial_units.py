"""Pieces of full-size trainings, as guests give them: when one is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from hydro_rasda import RaceConfig, TuneResult, Worker
from hydro_rasda.bubbles import BubbleBackend
from hydro_rasda.bubbles.partial_units import GroupWork, TargetWork
from hydro_rasda.contracts import FullSizeOutcome, FullSizeTask, Group, GroupTask, Span
from hydro_rasda.problem import Problem
from hydro_rasda.processes.retry_policy import Deaths
from hydro_rasda.run.state import Run
from tests.hydro_rasda.models import mlp
from tests.hydro_rasda.scripted import open_run

TASK = FullSizeTask("target/trial-0/to-4", 0, Span(0, 4), None, 0, 1)


@pytest.fixture
def run(problem: Problem, tmp_path: Path) -> Iterator[Run]:
    opened = open_run(tmp_path / "run", problem.with_settings(stop_at=0.1), 1)
    yield opened
    opened.store.close()


def given(task: FullSizeTask, epochs: Mapping[int, float], ended: bool = False) -> FullSizeOutcome:
    history = [(epoch, {"val_loss": score}) for epoch, score in epochs.items()]
    return FullSizeOutcome(task, {"model": {}}, history, None, 1.0, ended=ended)


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
def test_a_training_that_is_over_before_its_milestone_is_done(run: Run, last: FullSizeOutcome, over: bool) -> None:
    """Without patience left it may have no epoch to give; a training function need not report a `train_loss`."""
    work = TargetWork(run, TASK, 1)
    assert list(work.begin()) == [TASK]
    (rest,) = work.took(TASK, given(TASK, {1: 0.7, 2: 0.6}), go_on=True)
    assert rest.span == Span(2, 4)
    left = work.took(rest, last, go_on=True)
    assert (work.done, not left) == (over, over)
    if over:
        assert work.outcome is not None
        assert (work.outcome.task, work.outcome.ended) == (TASK, last.ended)
        assert [epoch for epoch, _ in work.outcome.history] == [1, 2, *(epoch for epoch, _ in last.history)]


def test_trials_whose_guests_die_again_and_again_fail_one_by_one(run: Run) -> None:
    """The group is tried again, then halved, until each of them is alone."""
    task = GroupTask("surrogate/to-2/group-0", (Group("a", (0, 1), True),), (), Span(0, 2))
    work, deaths = GroupWork(run, task, 1), Deaths()
    left = [*work.begin()]
    while left:
        left += work.died(left.pop(), "signal 9", deaths)
    assert work.done
    assert work.outcome.history == {0: [], 1: []}
    assert [*sorted(work.outcome.failures)] == [0, 1]
    assert all("signal 9" in error for error in work.outcome.failures.values())


def test_a_training_function_that_returns_early_ends_its_trial(
    quick: Callable[..., TuneResult], two_hosts: Path
) -> None:
    def full_size(worker: Worker) -> None:
        worker.report({"val_loss": 0.5}, {"model": mlp(dict(worker.config)).state_dict()})

    race = RaceConfig(grace_period=3, train=full_size)
    result = quick(num_samples=2, max_t=3, race=race, backend=BubbleBackend(two_hosts))
    assert result.finished
    assert {record.epochs for record in result.trials} <= {0, 1}
