"""The checks find out a backend that breaks its contract; `backends/test_contract.py` runs them on those there are."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hydro_rasda import LocalBackend
from hydro_rasda.backends.local import LocalDevice
from hydro_rasda.contracts import Devices, Finished, FullSizeOutcome, GroupTask, Widths
from hydro_rasda.run.state import Run
from hydro_rasda.testing import Check, backend_checks, backends
from hydro_rasda.testing.tiny_runs import is_running, train_two_rungs

each_check = pytest.mark.parametrize("check", backend_checks(), ids=lambda check: check.__name__)


@each_check
def test_each_check_says_what_it_demands(check: Check) -> None:
    assert check.__doc__


class Broken(LocalDevice):
    """A device that keeps one promise less."""


class Drops(Broken):
    def finished(self) -> Sequence[Finished]:
        super().finished()
        return []


class TrainsTwice(Broken):
    def finished(self) -> Sequence[Finished]:
        return [*super().finished()] * 2


class ForgetsKinds(Broken):
    def plan(self, device: int, kinds: Mapping[str, Any]) -> Mapping[str, Widths]:
        return dict(list(super().plan(device, kinds).items())[:1])


class AlwaysIdle(Broken):
    def idle(self) -> Sequence[int]:
        return [0]


class IgnoresSources(Broken):
    def start(self, device: int, task: GroupTask) -> None:
        super().start(device, dataclasses.replace(task, sources=()))


class FailsAll(Broken):
    def finished(self) -> Sequence[Finished]:
        (finished,) = super().finished()
        outcome = finished.outcome
        if outcome.failures:
            error = next(iter(outcome.failures.values()))
            outcome = dataclasses.replace(outcome, checkpoint=[], failures=dict.fromkeys(outcome.history, error))
        return [dataclasses.replace(finished, outcome=outcome)]


class ReadsAhead(Broken):
    def train_each(self, tasks: Any) -> Iterator[FullSizeOutcome]:
        yield from super().train_each(list(tasks))


class DropsTheLast(Broken):
    def train_each(self, tasks: Any) -> Iterator[FullSizeOutcome]:
        yield from list(super().train_each(tasks))[:-1]


class HasNoClock(Broken):
    def __init__(self, run: Run, device: torch.device) -> None:
        run.seconds_left = lambda stage: 1e9  # type: ignore[method-assign]
        super().__init__(run, device)


class WithDevices:
    device = torch.device("cpu")

    def __init__(self, kind: Callable[[Run, torch.device], Devices]) -> None:
        self._kind = kind

    @contextmanager
    def open(self, run: Run) -> Iterator[Devices]:
        yield self._kind(run, self.device)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Drops, "groups"),
        (TrainsTwice, "groups"),
        (ForgetsKinds, "groups"),
        (AlwaysIdle, "groups"),
        (IgnoresSources, "results"),
        (ReadsAhead, "full_size"),
        (DropsTheLast, "full_size"),
        (FailsAll, "failures"),
        (FailsAll, "deaths"),
        (HasNoClock, "time"),
    ],
)
def test_a_broken_backend_is_found_out(one_process: None, tmp_path: Path, kind: type[Broken], check: str) -> None:
    with pytest.raises(AssertionError, match="a backend breaks its contract: "):
        getattr(backends, f"check_{check}")(lambda: WithDevices(kind), tmp_path)


def test_processes_that_stay_are_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backends, "PATIENCE_S", 1.0)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stays:

        class Stays(Broken):
            def finished(self) -> Sequence[Finished]:
                (tmp_path / "processes" / f"{stays.pid}@{socket.gethostname()}").touch()
                return []

        try:
            with pytest.raises(AssertionError, match=rf"processes \[{stays.pid}\] end with the devices"):
                backends.check_leaving(lambda: WithDevices(Stays), tmp_path)
        finally:
            stays.kill()


def test_results_of_both_members_are_compared(tmp_path: Path) -> None:
    configs = [{"lr": lr, "optimizer": "sgd", "batch_size": 32} for lr in (0.1, 0.01)]
    found = train_two_rungs(LocalBackend(["cpu"]), tmp_path, configs)
    assert {n: [epoch for epoch, _ in history] for n, history in found.items()} == {0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}


def test_a_process_that_was_waited_for_is_not_running() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_running(process.pid)
    process.communicate(b"\n")
    assert not is_running(process.pid)
