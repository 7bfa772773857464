"""How many workers a full-size trial has, from the run's settings and its journal."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from hydro_rasda import RaceConfig
from hydro_rasda.backends.worker_numbers import WorkerNumbers
from hydro_rasda.contracts import Span, full_size_task
from hydro_rasda.history.lines import metric_lines
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.record_full_size import record_epochs
from tests.hydro_rasda.scripted import open_run


@pytest.mark.parametrize(
    ("workers", "most", "grows", "asked"),
    [
        (1, None, False, False),
        (1, None, True, True),
        (1, 1, True, False),
        (1, 2, False, True),
        (2, None, False, True),
        (2, 2, False, True),
    ],
)
def test_several_workers_are_asked_for_by_the_settings_or_by_the_backend(
    workers: int, most: int | None, grows: bool, asked: bool, problem: Problem, tmp_path: Path
) -> None:
    settings = problem.with_settings(race=RaceConfig(workers=workers, max_workers=most))
    run = open_run(tmp_path / "run", settings, 1)
    with closing(run.store):
        found = WorkerNumbers(run, grows)
    assert (found.asked, found.first) == (asked, workers)


def test_between_milestones_a_trial_keeps_its_last_workers_as_far_as_there_are_so_many(
    problem: Problem, tmp_path: Path
) -> None:
    race = RaceConfig(grace_period=1, workers=1, max_workers=4, grow="efficient")
    run = open_run(tmp_path / "run", problem.with_settings(max_t=8, race=race), 2)
    with closing(run.store):
        told = [(epoch, {"val_loss": 0.5, "workers": count}) for epoch, count in ((1, 1), (2, 1), (3, 3))]
        record_epochs(run, 0, metric_lines("race", 0, told), {"model": {}})
        numbers = WorkerNumbers(run, grows=False)
        task = full_size_task("race/trial-0/to-4", 0, Span(3, 4), None, 0, 2)
        assert [numbers.of(task, capacity) for capacity in (1, 2, 8)] == [1, 2, 3]
        fresh = full_size_task("race/trial-1/to-1", 1, Span(0, 1), None, 0, 2)
        assert numbers.of(fresh, 8) == 1
