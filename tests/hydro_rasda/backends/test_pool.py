"""The pool of devices by script: processes that answer, or die, when they are told to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hydro_rasda import RaceConfig
from hydro_rasda.backends import pool as pool_module
from hydro_rasda.backends.pool import Answer, DeviceDied, DevicePool
from hydro_rasda.contracts import Finished, Group, Outcome, Span, Task, Widths, full_size_task, group_key
from hydro_rasda.heats.train_tasks import train_tasks
from hydro_rasda.problem.problem import Problem
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.run.journal import read_messages
from hydro_rasda.run.state import Run
from hydro_rasda.training.group_training import Load
from tests.hydro_rasda.scripted import open_run

SPAN = Span(0, 2)


class Said:
    """An answer that is there at once; dying is one, too."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Never(Said):
    """An answer that does not come."""


class Scripted:
    """A process that trains at once, and dies of what its pool calls deadly."""

    def __init__(self, pool: ScriptedPool, device: int) -> None:
        self.pool, self.device, self.ended = pool, device, False

    def ask(self, method: str, *arguments: Any) -> Said:
        assert not self.ended
        if method in self.pool.deadly:
            return Said(DeviceDied(f"it died of {method}"))
        work: Any = arguments[0] if arguments else None
        if method == "describe":
            if self.device in self.pool.held:
                return Never(None)
            return Said(("a machine", self.pool.cores_each, "a node"))
        if method == "plan":
            if self.pool.hanging_plans:
                return Never(None)
            return Said({kind: Widths(8) for kind in work})
        if method == "train_rank":
            self.pool.trained.append((work.number,))
            error = self.pool.rank_errors.get(self.device, "it raised" if work.number in self.pool.raising else None)
            if work.number in self.pool.deadly or error == "SIGKILL":
                return Said(DeviceDied("SIGKILL"))
            outcome = Outcome.failed(work.number, error) if error else Outcome.of_model(work.number, {}, [], 1.0)
            return Said([Finished(work, outcome)])
        numbers = [number for task in work for number in task.members]
        self.pool.trained.append(tuple(numbers))
        if self.pool.hanging & set(numbers):
            return Never(None)
        if self.pool.deadly & set(numbers):
            return Said(DeviceDied("SIGKILL"))
        return Said([Finished(task, Outcome([], {n: [] for n in task.members}, {}, 1.0)) for task in work])

    def end(self) -> None:
        self.ended = True


class ScriptedPool(DevicePool):
    """Devices whose answers arrive one at a time, the last one that was asked for first; or never."""

    hanging_plans = False
    raising: frozenset[int] = frozenset()
    rank_errors: Mapping[int, str] = MappingProxyType({})
    """The error with which the rank on a device ends; the rank dies if the error is "SIGKILL"."""
    held: frozenset[int] = frozenset()
    """Devices that other jobs use: their processes never come."""
    machines_end = 0
    """So many of the processes that die do so with their machines."""

    def __init__(
        self,
        run: Run,
        count: int,
        deadly: Iterable[object] = (),
        cores: int = 1,
        hanging: Iterable[int] = (),
        grows: bool = False,
    ) -> None:
        super().__init__(run, count, "gloo", grows)
        self.deadly, self.cores_each, self.hanging = set(deadly), cores, set(hanging)
        self.trained: list[tuple[int, ...]] = []
        self.processes: list[Scripted] = []

    def _process(self, device: int) -> Scripted:
        self.processes.append(Scripted(self, device))
        return self.processes[-1]

    def _ready(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        return [answer for answer in answers if not isinstance(answer, Never)][-1:]

    def _load(self, keys: Iterable[str]) -> Load:
        return lambda key: {}

    def _meeting(self, devices: Sequence[int]) -> str:
        return "a meeting"

    def _is_lost(self, device: int) -> bool:
        self.machines_end -= 1
        return self.machines_end >= 0


@pytest.fixture
def run(problem: Problem, tmp_path: Path) -> Iterator[Run]:
    opened = open_run(tmp_path / "run", problem, 8)
    yield opened
    opened.store.close()


def group(*members: int) -> Task:
    return Task(group_key("sweep", SPAN, members), (Group("a kind", members, len(members) > 1),), (), SPAN)


def rest_of(pool: DevicePool) -> list[Finished]:
    """The tasks that are done until nothing is under way."""
    done = list[Finished]()
    while pool.busy():
        done += pool.finished()
    return done


def failures_of(done: Iterable[Finished]) -> dict[int, str]:
    return {n: error for finished in done for n, error in finished.outcome.failures.items()}


def targets(*numbers: int, beside: int = 1) -> list[Task]:
    return [full_size_task(f"race/{n}", n, SPAN, None, 0, beside) for n in numbers]


def test_what_died_is_trained_by_whichever_device_is_free_before_anything_new(run: Run) -> None:
    pool = ScriptedPool(run, 2, deadly=[1])
    assert pool.idle() == [0, 1]
    pool.start(0, group(0, 1))
    pool.start(1, group(2))
    done = [*pool.finished(), *pool.finished()]
    assert [finished.task.members for finished in done] == [(2,)]
    assert pool.idle() == []  # before new groups, what died
    assert pool.busy()
    done += rest_of(pool)
    assert pool.trained == [(0, 1), (2,), (0, 1), (0,), (1,), (1,)]
    failures = failures_of(done)
    assert failures == {1: "the process that trained it died 2 times: SIGKILL"}
    assert sorted(n for finished in done for n in finished.outcome.history) == [0, 1, 2]
    assert sum(not process.ended for process in pool.processes) == 2


def test_what_hangs_is_ended_once_it_is_known_how_long_others_take(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangDetector, "TIMES", 1)
    monkeypatch.setattr(HangDetector, "LEAST_S", 0.2)
    pool = ScriptedPool(run, 1, hanging=[1])
    pool.idle()
    pool.start(0, group(0))
    done = [*pool.finished()]
    pool.start(0, group(1, 2))
    done += rest_of(pool)
    failures = failures_of(done)
    assert failures.keys() == {1}
    assert "died 2 times: it was ended as it hung: no epoch was over for 0 s" in failures[1]
    assert sorted(n for finished in done for n in finished.outcome.history) == [0, 1, 2]
    list(train_tasks(pool, targets(3)))
    (finished,) = train_tasks(pool, targets(1))
    assert "it was ended as it hung" in str(finished.outcome.error)
    assert finished.outcome.died
    assert all(process.ended for process in pool.processes[:-1])


def test_what_hangs_before_anything_was_heard_is_ended_by_the_dry_runs_times(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HangDetector, "FIRST_LEAST_S", 0.1)
    run.problem = replace(run.problem, epoch_seconds=1e-6)
    pool = ScriptedPool(run, 1, hanging=[0])
    pool.idle()
    assert pool.plan(0, {"a kind": []}) == {"a kind": Widths(8)}
    pool.hanging_plans = True
    assert pool.plan(0, {"a kind": []}) == {"a kind": Widths(1, assumed=True)}
    while not pool.idle():
        pool.finished()
    pool.start(0, group(0))
    done = rest_of(pool)
    told = "no epoch was over for 0 s, by the dry run's times it takes 1e-06 s (100 times as long, and at least 0 s"
    assert told in done[-1].outcome.failures[0]


def test_a_device_has_no_speed_before_it_has_trained_the_kind(run: Run) -> None:
    pool = ScriptedPool(run, 1)
    assert (pool.idle(), pool.speed(0, "a kind")) == ([0], None)
    pool.start(0, group(0, 1, 2))
    pool.finished()
    assert pool.speed(0, "a kind") == 6.0  # epochs of a trial in a second
    assert pool.speed(0, "another") is None


def test_measuring_that_kills_a_process_means_one_by_one(run: Run) -> None:
    pool = ScriptedPool(run, 1, deadly=["plan"])
    pool.idle()
    assert pool.plan(0, {"a kind": [run.history.trials[0]]}) == {"a kind": Widths(1, assumed=True)}
    assert (pool.idle(), pool.busy()) == ([], True)  # until the next process is there
    assert pool.finished() == []
    assert pool.idle() == [0]
    assert [process.ended for process in pool.processes] == [True, False]


def test_a_machine_that_ends_while_it_measures_tells_nothing(run: Run) -> None:
    """Others of its name would train one by one, and the device is not waited for."""
    pool = ScriptedPool(run, 2, deadly=["plan"])
    pool.idle()
    pool.machines_end, pool.held = 1, frozenset([0])
    assert pool.plan(0, {"a kind": [run.history.trials[0]]}) == {}
    assert pool.idle() == [1]


def test_processes_that_never_come_are_an_error(run: Run) -> None:
    pool = ScriptedPool(run, 2, deadly=["describe"])
    with pytest.raises(RuntimeError, match="the process of a device did not start:\nit died of describe"):
        pool.idle()
    assert len(pool.processes) == 5, "two, and another one for each of three that died before the last one did"


@pytest.mark.timeout(60)
def test_devices_that_other_jobs_hold_are_told_of_and_left_out(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two workers that a full-size model is to have, one is there."""
    monkeypatch.setattr(pool_module, "ARRIVAL_S", 0.05)
    run = open_run(tmp_path / "run", problem.with_settings(race=RaceConfig(workers=2)), 8)
    with run.store, closing(ScriptedPool(run, 2, grows=True)) as pool:
        pool.held = frozenset([1])
        assert pool.idle() == [0]
        told = [message.text for message in read_messages(run.store.path)]
        assert told == ["1 of 2 devices have come. Other jobs may use the rest, which joins later."]
        assert [finished.outcome.error for finished in train_tasks(pool, targets(1))] == [None]


@pytest.mark.timeout(60)
def test_where_no_device_comes_the_time_budget_ends_the_wait(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "ARRIVAL_S", 0.05)
    monkeypatch.setattr(Run, "out_of_time", lambda *_: True)
    pool = ScriptedPool(run, 2)
    pool.held = frozenset([0, 1])
    assert (pool.idle(), pool.busy()) == ([], False)
    assert list(train_tasks(pool, targets(1))) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("task", [group(1, 2), *targets(1)], ids=["a group", "a full-size model"])
def test_where_no_device_comes_back_the_time_budget_ends_the_wait(
    run: Run, monkeypatch: pytest.MonkeyPatch, task: Task
) -> None:
    monkeypatch.setattr(Run, "out_of_time", lambda *_: True)
    pool = ScriptedPool(run, 1, deadly=[1])
    pool.idle()
    pool.held = frozenset([0])
    assert list(train_tasks(pool, [task])) == []
    assert pool.trained == [task.members]


def test_nothing_is_busy_before_it_was_asked_for(run: Run) -> None:
    pool = ScriptedPool(run, 1)
    pool.begin()
    assert not pool.busy()


def test_full_size_models_share_the_devices_that_no_group_occupies(run: Run) -> None:
    pool = ScriptedPool(run, 3, cores=4)
    pool.idle()
    pool.start(0, group(0))
    done = [finished.task.number for finished in train_tasks(pool, targets(1, 2, 3, 4, 5, beside=5))]
    assert pool.trained[:3] == [(0,), (1, 2), (3, 4)]  # a third of five, rounded up
    done += [finished.task.number for finished in rest_of(pool)]
    assert sorted(done) == [0, 1, 2, 3, 4, 5]


def test_full_size_models_wait_where_groups_occupy_all_devices(run: Run) -> None:
    pool = ScriptedPool(run, 1)
    pool.idle()
    pool.start(0, group(0))
    assert [finished.task.number for finished in train_tasks(pool, targets(1, 2))] == [0, 1, 2]
    assert pool.trained == [(0,), (1,), (2,)]


def test_a_group_that_died_begins_again_while_ranks_train(problem: Problem, tmp_path: Path) -> None:
    """As while transfer is checked; else no device would ever be free for a rank."""
    race = RaceConfig(workers=2)
    run = open_run(tmp_path / "run", problem.with_settings(race=race), 8)
    with run.store, closing(ScriptedPool(run, 2, grows=True, deadly=[0])) as pool:
        pool.idle()
        pool.start(0, group(0))
        done = [finished.task.number for finished in train_tasks(pool, targets(1))]
        assert pool.trained == [(0,), (0,), (1,), (1,)]
        assert done == [0, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_ends_with_its_machine_is_not_to_blame(problem: Problem, tmp_path: Path, workers: int) -> None:
    """Of a group, of a full-size model, and of one of several ranks."""
    run = open_run(tmp_path / "run", problem.with_settings(race=RaceConfig(workers=workers)), 8)
    with run.store, closing(ScriptedPool(run, 2, grows=True, deadly=[0, 1])) as pool:
        pool.idle()
        pool.start(0, group(0))
        pool.machines_end = 3
        done = rest_of(pool)
        assert pool.trained == [(0,)] * 5
        assert done[0].outcome.failures == {0: "the process that trained it died 2 times: SIGKILL"}
        pool.machines_end = 3
        (died,) = train_tasks(pool, targets(1))
        assert pool.trained.count((1,)) == 5 * workers
        assert "died 2 times: SIGKILL" in str(died.outcome.error)


def test_a_process_that_raised_is_kept_where_nobody_waits_for_it(run: Run) -> None:
    with closing(ScriptedPool(run, 2, grows=True)) as pool:
        pool.raising = frozenset([1])
        (finished,) = train_tasks(pool, targets(1))
        assert finished.outcome.error == "it raised"
        assert len(pool.processes) == 2
    run.problem = run.problem.with_settings(race=RaceConfig(workers=2))
    with closing(ScriptedPool(run, 2, grows=True)) as pool:
        pool.raising = frozenset([1])
        list(train_tasks(pool, targets(1)))
        assert len(pool.processes) == 4


VAIN = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"
"""The error of a rank that waited for one that has ended."""


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ({0: "it raised", 1: VAIN}, "it raised"),
        ({0: VAIN, 1: "it raised"}, "it raised"),
        ({1: "it raised"}, "it raised"),
        ({0: "SIGKILL", 1: VAIN}, "the process that trained it died 2 times: SIGKILL"),
        ({0: "it raised", 1: "SIGKILL"}, "the process that trained it died 2 times: SIGKILL"),
    ],
)
def test_a_trial_fails_with_the_error_of_the_rank_that_caused_it(
    problem: Problem, tmp_path: Path, errors: Mapping[int, str], told: str
) -> None:
    """Its other rank waits in vain, or returns. The ending of rank 1 comes first."""
    run = open_run(tmp_path / "run", problem.with_settings(race=RaceConfig(workers=2)), 8)
    with run.store, closing(ScriptedPool(run, 2, grows=True)) as pool:
        pool.rank_errors = errors
        (finished,) = train_tasks(pool, targets(1))
        assert finished.outcome.error == told


def test_a_full_size_model_that_dies_beside_another_is_tried_again_alone(run: Run) -> None:
    pool = ScriptedPool(run, 1, deadly=[1], cores=2)
    done = train_tasks(pool, targets(0, 1, 2, beside=3))
    errors = {finished.task.number: finished.outcome.error for finished in done}
    assert pool.trained == [(0, 1), (0,), (1,), (2,)]
    assert errors == {0: None, 1: "the process that trained it died 2 times: SIGKILL", 2: None}


def test_leaving_ends_all_processes(run: Run) -> None:
    pool = ScriptedPool(run, 2)
    pool.idle()
    pool.start(0, group(0))
    pool.close()
    assert all(process.ended for process in pool.processes)
