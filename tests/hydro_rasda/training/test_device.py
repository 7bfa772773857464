"""A device's cores train what one core does, and lose nothing where a process dies."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Group, Outcome, Span, Task, Widths, full_size_task
from hydro_rasda.dry_run.dry_run import dry_run
from hydro_rasda.problem.problem import Problem
from hydro_rasda.processes.child_count import ONE_PROCESS
from hydro_rasda.training.device import DeviceShare, DeviceTrainer, Work
from tests.hydro_rasda.conftest import on_threads
from tests.hydro_rasda.models import Config, mlp

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes that have computed are forked on Linux alone"
)

TRIALS = {n: Trial(n, {"lr": 0.01 * (n + 1), "batch_size": (32, 64)[n % 2], "momentum": 0.9}) for n in range(6)}
EVEN, ODD = Group("even", (0, 2, 4), fused=True), Group("odd", (1, 3, 5), fused=True)
ONE, OTHER = Group("even", (0,), fused=True), Group("odd", (1,), fused=True)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    with on_threads(3):
        yield


def work(told: list[Any] | None = None, trials: Mapping[int, Trial] = TRIALS) -> Work:
    def no_checkpoint(key: str) -> Any:
        raise KeyError(key)

    heard = [] if told is None else told
    return Work(trials, no_checkpoint, lambda: False, lambda *content: heard.append(content))


def groups(*those: Group) -> Task:
    return Task("a task", those, (), Span(0, 2))


def train_groups(device: DeviceTrainer, task: Task, how: Work) -> Outcome:
    (finished,) = device.train([task], how)
    return finished.outcome


def with_deadly(number: int) -> dict[int, Trial]:
    return {**TRIALS, number: Trial(number, {**TRIALS[number].config, "deadly": True})}


def deadly(problem: Problem, folder: Path, times: int) -> Problem:
    """Trials with `deadly` in their configuration kill the process that builds them, so many times."""
    here = os.getpid()

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        if "deadly" in config and os.getpid() != here and len(list(folder.iterdir())) < times:
            (folder / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return mlp(config, width_ratio)

    folder.mkdir()
    return replace(problem, model_fn=model_fn)


def test_groups_beside_each_other_are_the_groups_one_after_another(problem: Problem) -> None:
    device, told = DeviceTrainer(problem), list[Any]()
    both = train_groups(device, groups(EVEN, ODD), work(told))
    assert [part["members"] for part in both.checkpoint] == [[0, 2, 4], [1, 3, 5]]
    assert sum(epochs for epochs, *_ in told) == 12
    for group in (EVEN, ODD):
        alone = train_groups(device, groups(group), work())
        for number in group.members:
            for (epoch, metrics), (its_epoch, its_metrics) in zip(
                both.history[number], alone.history[number], strict=True
            ):
                assert epoch == its_epoch
                assert metrics == pytest.approx(its_metrics, rel=1e-4)


def test_a_warning_of_each_milestone_is_given_once(problem: Problem) -> None:
    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        warnings.warn("of the model", UserWarning, stacklevel=1)
        return mlp(config, width_ratio)

    device = DeviceTrainer(replace(problem, model_fn=model_fn))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for group in (EVEN, ODD):
            train_groups(device, groups(group), work())
    assert [str(warning.message) for warning in caught] == ["of the model"]


def test_a_process_that_died_once_costs_time_alone(problem: Problem, tmp_path: Path) -> None:
    """On as many threads as it had, so that sums are added up in the same order: what it gives is the same."""
    trials = with_deadly(1)
    unbroken = train_groups(DeviceTrainer(problem), groups(EVEN, ODD), work(trials=trials))
    folder = tmp_path / "deaths"
    outcome = train_groups(DeviceTrainer(deadly(problem, folder, times=1)), groups(EVEN, ODD), work(trials=trials))
    assert len(list(folder.iterdir())) == 1
    assert not outcome.failures
    assert outcome.history == unbroken.history
    for part, whole in zip(outcome.checkpoint, unbroken.checkpoint, strict=True):
        for name, value in whole["state"]["model"].items():
            assert torch.equal(part["state"]["model"][name], value)


def test_what_is_trained_again_has_the_threads_that_it_had(problem: Problem, tmp_path: Path) -> None:
    seen = tmp_path / "threads"

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        with seen.open("a") as file:
            file.write(str(torch.get_num_threads()))
        os.kill(os.getpid(), signal.SIGKILL)
        return mlp(config, width_ratio)

    device = DeviceTrainer(replace(problem, model_fn=model_fn))
    assert train_groups(device, groups(ONE, OTHER), work()).failures
    list(device.train(tasks(0, 1), work()))
    assert seen.read_text() == "1" * 8


@pytest.mark.parametrize("threads", [1, 3])
def test_what_kills_its_process_fails_alone_where_nothing_trains_beside_it(
    problem: Problem, tmp_path: Path, threads: int
) -> None:
    torch.set_num_threads(threads)
    trials = with_deadly(0)
    dying = DeviceTrainer(deadly(problem, tmp_path / "deaths", times=1000))
    assert train_groups(dying, groups(ONE), work(trials=trials)).failures.keys() == {0}
    (finished,) = dying.train(tasks(0), work(trials=trials))
    assert finished.outcome.error is not None
    assert finished.outcome.died


@pytest.mark.parametrize("forked", [True, False])
def test_code_that_would_end_the_script_fails_its_trial(
    problem: Problem, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not forked:
        monkeypatch.setenv(ONE_PROCESS, "1")

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        sys.exit(0)

    def objective(model: nn.Module, batch: Any) -> Any:
        sys.exit(0)

    for broken in (replace(problem, model_fn=model_fn), replace(problem, objective=objective)):
        device = DeviceTrainer(broken)
        assert "SystemExit" in train_groups(device, groups(ONE), work()).failures[0]
        (finished,) = device.train(tasks(0), work())
        assert finished.outcome.error is not None
        assert "SystemExit" in finished.outcome.error
        assert not finished.outcome.died
        with pytest.raises(ValueError, match="SystemExit"):
            dry_run(broken, [TRIALS[0]])


def test_only_the_trial_that_kills_its_process_fails(problem: Problem, tmp_path: Path) -> None:
    trials = with_deadly(3)
    dying = DeviceTrainer(deadly(problem, tmp_path / "deaths", times=1000))
    outcome = train_groups(dying, groups(EVEN, ODD), work(trials=trials))
    assert set(outcome.failures) == {3}
    assert "the process that trained it died 2 times: SIGKILL" in outcome.failures[3]
    assert {n: len(history) for n, history in outcome.history.items()} == {0: 2, 1: 2, 2: 2, 3: 0, 4: 2, 5: 2}
    trained = sorted(n for part in outcome.checkpoint for n in part["members"])
    assert trained == [0, 1, 2, 4, 5]


BALLAST = 120 * 2**20
ROOM = 200 * 2**20
"""Bytes: for one trial with its ballast, not for two."""


def heavy(problem: Problem, folder: Path, together: bool = False) -> Problem:
    """Each process takes `BALLAST` when it first builds a model; the first two wait for each other.

    It keeps that to its end: a peak counts no code of libraries, of which a process maps more after it has built.

    Args:
        problem: What is tuned.
        folder: Gets the number of each process, in "began".
        together: Whether two go on beside each other; otherwise one of them is waited for to die.
    """
    here = os.getpid()
    kept: dict[int, Tensor] = {}

    def pids() -> list[int]:
        return [int(pid) for pid in (folder / "began").read_text().split()]

    def is_child(pid: int) -> bool:  # numbers are given again, to others
        try:
            return bool(psutil.Process(pid).ppid() == here)
        except psutil.NoSuchProcess:
            return False

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        if os.getpid() not in (here, *kept):
            with (folder / "began").open("a") as began:
                began.write(f"{os.getpid()} ")
            kept[os.getpid()] = torch.ones(BALLAST, dtype=torch.uint8)
            while len(pids()) < 2:
                time.sleep(0.01)
            while not together and any(is_child(pid) for pid in pids() if pid != os.getpid()):
                time.sleep(0.01)
        return mlp(config, width_ratio)

    folder.mkdir()
    return replace(problem, model_fn=model_fn)


@contextmanager
def out_of_memory_killer(room: int) -> Iterator[list[int]]:
    """Does what the kernel does where memory runs out: kills the largest of what is forked from now on; gives whom."""
    over, killed = threading.Event(), list[int]()
    others = {child.pid for child in psutil.Process().children()}  # of other tests, such as torch's compilers

    def own(process: psutil.Process) -> int:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            return 0
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))

    def watch() -> None:
        while not over.wait(0.01):
            children = {child.pid: own(child) for child in psutil.Process().children() if child.pid not in others}
            if sum(children.values()) > room:
                killed.append(max(children, key=lambda pid: children[pid]))
                os.kill(killed[-1], signal.SIGKILL)
                while psutil.pid_exists(killed[-1]) and not over.is_set():
                    time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("heat", ["sweep", "race"])
def test_what_is_killed_for_memory_trains_alone_from_then_on(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heat: str
) -> None:
    """Nobody knew what either takes. Then that is kept: a later call trains one after the other, and none is killed."""
    monkeypatch.setenv("HYDRO_RASDA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "heavy"
    asked = heavy(problem, folder)

    def train(problem: Problem) -> dict[int, Any]:
        device = DeviceTrainer(problem, share=DeviceShare(memory=ROOM))
        if heat == "sweep":
            outcome = train_groups(device, groups(ONE, OTHER), work())
            assert not outcome.failures
            return outcome.history
        outcomes = {done.task.number: done.outcome for done in device.train(tasks(0, 1), work())}
        assert not any(outcome.error for outcome in outcomes.values())
        return {number: outcome.epochs for number, outcome in outcomes.items()}

    def began() -> int:
        return len((folder / "began").read_text().split())

    unbroken = train(problem)
    with out_of_memory_killer(ROOM) as killed:
        first = train(asked)
        assert (len(killed), began()) == (1, 3)
        second = train(asked)
    assert (len(killed), began()) == (1, 5)
    assert first.keys() == second.keys() == {0, 1}
    assert first == unbroken  # on as many threads
    assert all(len(history) == 2 for history in second.values())


def test_what_fits_memory_trains_at_the_same_time(problem: Problem, tmp_path: Path) -> None:
    asked = heavy(problem, tmp_path / "heavy", together=True)
    device = DeviceTrainer(asked, share=DeviceShare(memory=3 * BALLAST))
    device._peaks_of("sweep").learn("even+adamw", 1, 1.2 * BALLAST)
    device._peaks_of("sweep").learn("odd+adamw", 1, 1.2 * BALLAST)
    outcome = train_groups(device, groups(ONE, OTHER), work())  # would wait for ever for each other
    assert not outcome.failures


def test_the_share_of_memory_is_told_in_hundredths_of_a_core(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the same groups are made where a peak was measured a little differently."""
    monkeypatch.setattr("hydro_rasda.training.device.planned_widths", lambda *_: {"even": Widths(4)})
    for peak in (0.1235, 0.1265):
        device = DeviceTrainer(problem, share=DeviceShare(memory=1e6))
        device._peaks_of("sweep").learn("even+adamw", 4, peak * 1e6)
        assert device.plan({"even": [TRIALS[0]]})["even"].share == 37 / 300


def tasks(*numbers: int) -> list[Task]:
    return [full_size_task(f"race/{n}", n, Span(0, 2), None, 0, len(numbers)) for n in numbers]


def test_full_size_trials_beside_each_other_are_those_one_after_another(problem: Problem) -> None:
    device, told, began = DeviceTrainer(problem), list[Any](), time.perf_counter()
    finished = list(device.train(tasks(0, 1, 2), work(told)))
    assert [done.beside for done in finished] == [3, 3, 3]
    assert sum(done.outcome.seconds for done in finished) <= time.perf_counter() - began, "they divide the wall time"
    beside = {done.task.number: done.outcome for done in finished}
    assert sum(epochs for epochs, *_ in told) == 6
    for number, outcome in beside.items():
        (done,) = device.train(tasks(number), work())
        alone = done.outcome
        for (epoch, metrics), (its_epoch, its_metrics) in zip(alone.epochs, outcome.epochs, strict=True):
            assert epoch == its_epoch
            assert metrics == pytest.approx(its_metrics, rel=1e-4)
        for name, value in alone.state["model"].items():
            torch.testing.assert_close(outcome.state["model"][name], value, rtol=1e-3, atol=1e-4)


def test_a_full_size_trial_has_a_second_chance_alone(problem: Problem, tmp_path: Path) -> None:
    trials = with_deadly(1)
    once = DeviceTrainer(deadly(problem, tmp_path / "once", times=1))
    found = {done.task.number: done.outcome.error for done in once.train(tasks(0, 1), work(trials=trials))}
    assert found == {0: None, 1: None}
    twice = DeviceTrainer(deadly(problem, tmp_path / "twice", times=2))
    errors = {done.task.number: done.outcome.error for done in twice.train(tasks(0, 1), work(trials=trials))}
    assert errors[0] is None
    assert errors[1] is not None
    assert "died 2 times: SIGKILL" in errors[1]


def test_the_fewer_are_left_the_more_threads_each_has(problem: Problem) -> None:
    """RASDA's doubling in space: three trials have a thread each of three, one has all."""
    seen: list[int] = []

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        raise RuntimeError(f"threads: {torch.get_num_threads()}")

    device = DeviceTrainer(replace(problem, model_fn=model_fn))
    for numbers in ((0, 1, 2), (0,)):
        for done in device.train(tasks(*numbers), work()):
            assert done.outcome.error is not None
            seen.append(int(done.outcome.error.strip().rsplit(" ", 1)[1]))
    assert seen == [1, 1, 1, 3]
