"""The checks find out a backend that breaks its contract; `backends/test_contract.py` runs them on those there are."""

from __future__ import annotations

import dataclasses
import os
import re
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
from hydro_rasda.contracts import Devices, Finished, History, Outcome, Task, Widths
from hydro_rasda.run.state import Run
from hydro_rasda.testing import Check, backend_checks, backends
from hydro_rasda.testing.tiny_runs import group, is_running, train_two_rungs
from hydro_rasda.training.group_training import joined

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
    def plan(self, device: int, kinds: Mapping[str, Any], width: float | None = None) -> Mapping[str, Widths]:
        return dict(list(super().plan(device, kinds, width).items())[:1])


class AlwaysIdle(Broken):
    def idle(self, task: Task | None = None) -> Sequence[int]:
        return [0]


class IgnoresSources(Broken):
    def start(self, device: int, task: Task) -> None:
        super().start(device, dataclasses.replace(task, sources=()))


class FailsAll(Broken):
    def finished(self) -> Sequence[Finished]:
        (finished,) = super().finished()
        outcome = finished.outcome
        if outcome.failures:
            error = next(iter(outcome.failures.values()))
            outcome = dataclasses.replace(outcome, checkpoint=[], failures=dict.fromkeys(outcome.history, error))
        return [dataclasses.replace(finished, outcome=outcome)]


class TakesAll(Broken):
    def idle(self, task: Task | None = None) -> Sequence[int]:
        return super().idle() if task is None or not task.is_full_size else [0]


class TakesAllButTheSweep(Broken):
    """Takes for a full-size model what is no task of the sweep."""

    def idle(self, task: Task | None = None) -> Sequence[int]:
        return super().idle() if task is None or task.heat == "sweep" else [0]


class IgnoresWidths(Broken):
    def start(self, device: int, task: Task) -> None:
        width = None if task.width is None else 0.5
        super().start(device, dataclasses.replace(task, width=width))


class IgnoresHeats(Broken):
    def finished(self) -> Sequence[Finished]:
        return [
            dataclasses.replace(done, task=dataclasses.replace(done.task, heat="sweep", width=None))
            for done in super().finished()
        ]


class HasNoClock(Broken):
    def __init__(self, run: Run, device: torch.device) -> None:
        run.seconds_left = lambda heat: 1e9  # type: ignore[method-assign]
        super().__init__(run, device)


class WithDevices:
    device = torch.device("cpu")

    def __init__(self, kind: Callable[[Run, torch.device], Devices]) -> None:
        self._kind = kind

    @contextmanager
    def open(self, run: Run) -> Iterator[Devices]:
        yield self._kind(run, self.device)


class IsBusyAtOnce(Broken):
    def busy(self) -> bool:
        return True


class IsNeverBusy(Broken):
    def idle(self, task: Task | None = None) -> Sequence[int]:
        return [] if super().busy() else [0]

    def busy(self) -> bool:
        return False


class PlansNoTrials(Broken):
    def plan(self, device: int, kinds: Mapping[str, Any], width: float | None = None) -> Mapping[str, Widths]:
        return dict.fromkeys(kinds, Widths(0))


class DoesNotPlanForOne(Broken):
    def plan(self, device: int, kinds: Mapping[str, Any], width: float | None = None) -> Mapping[str, Widths]:
        return dict.fromkeys(kinds, Widths(2, throughput={2: 1.0}))


class HasNoCores(Broken):
    def cores(self, device: int) -> int:
        return 0


class HasNoName(Broken):
    def machine(self, device: int) -> Any:
        return None


class HasNoSpeed(Broken):
    def speed(self, device: int, kind: str) -> Any:
        return 0.0


class RenamesTasks(Broken):
    def finished(self) -> Sequence[Finished]:
        return [dataclasses.replace(done, task=dataclasses.replace(done.task, key="?")) for done in super().finished()]


class AnswersOtherwise(Broken):
    """Changes the outcomes of groups, and of full-size models."""

    def finished(self) -> Sequence[Finished]:
        found = ((done, self.changed(done.outcome, done.task.heat)) for done in super().finished())
        return [dataclasses.replace(done, outcome=outcome) for done, outcome in found if outcome is not None]

    def changed(self, outcome: Outcome, heat: str) -> Outcome | None:
        return outcome


class TellsAnEpochLess(AnswersOtherwise):
    def changed(self, outcome: Outcome, heat: str) -> Outcome:
        return dataclasses.replace(outcome, history={n: of[:1] for n, of in outcome.history.items()})


class GivesNoReason(AnswersOtherwise):
    def changed(self, outcome: Outcome, heat: str) -> Outcome:
        return dataclasses.replace(outcome, failures=dict.fromkeys(outcome.failures, "?"))


class FailsEachFullSizeModel(AnswersOtherwise):
    def changed(self, outcome: Outcome, heat: str) -> Outcome:
        failed = {number: Outcome.failed(number, "this trial raises") for number in outcome.history}
        return outcome if heat == "sweep" else joined(failed.values())


class DropsFailedFullSizeModels(AnswersOtherwise):
    def changed(self, outcome: Outcome, heat: str) -> Outcome | None:
        return outcome if heat == "sweep" or not outcome.error else None


class ComputesOtherwise(AnswersOtherwise):
    def changed(self, outcome: Outcome, heat: str) -> Outcome:
        def moved(history: History) -> History:
            return [(epoch, {name: value + 1 for name, value in metrics.items()}) for epoch, metrics in history]

        return dataclasses.replace(outcome, history={n: moved(of) for n, of in outcome.history.items()})


class DropsTheLast(AnswersOtherwise):
    def changed(self, outcome: Outcome, heat: str) -> Outcome | None:
        return None if 4 in outcome.history else outcome


class TellsOfTheLastEpochAlone(AnswersOtherwise):
    """Of no other while it trains either."""

    def changed(self, outcome: Outcome, heat: str) -> Outcome:
        self._run.history.live.clear()
        return dataclasses.replace(outcome, history={n: of[-1:] for n, of in outcome.history.items()})


class HasNoClockAtFullSize(Broken):
    def start(self, device: int, task: Task) -> None:
        if task.heat == "race":
            self._run.seconds_left = lambda heat: 1e9  # type: ignore[method-assign]
        super().start(device, task)


@pytest.mark.parametrize(
    ("kind", "check", "promise"),
    [
        (Drops, "groups", "each trial trains once"),
        (TrainsTwice, "groups", "each trial trains once"),
        (ForgetsKinds, "groups", "`plan` answers for each kind"),
        (PlansNoTrials, "groups", "`plan` gives widths >= 1"),
        (DoesNotPlanForOne, "groups", "`plan` gives widths >= 1"),
        (AlwaysIdle, "groups", "a device is not `idle` before it has finished its task"),
        (IsBusyAtOnce, "groups", "devices are not `busy` before anything was begun"),
        (IsNeverBusy, "groups", "devices are `busy` while one has a task"),
        (HasNoCores, "groups", "`cores` is 1 or more"),
        (HasNoName, "groups", "`machine` is a string"),
        (HasNoSpeed, "groups", "`speed` is None or positive"),
        (RenamesTasks, "groups", "`finished` names its task"),
        (TellsAnEpochLess, "groups", "trial 0 trains epochs 1 and 2 once each"),
        (IgnoresSources, "results", "metrics are those of the local backend"),
        (TakesAllButTheSweep, "middle_heat", "no more tasks begin than the 1 that devices have room for"),
        (IgnoresWidths, "middle_heat", "a task of the middle heat trains surrogates of its own width"),
        (IgnoresHeats, "middle_heat", "`finished` names the heat of its task"),
        (TakesAll, "full_size", "no more tasks begin than the 1 that devices have room for"),
        (DropsTheLast, "full_size", "each trial trains once"),
        (FailsEachFullSizeModel, "full_size", "full-size models train without an error"),
        (ComputesOtherwise, "full_size", "full-size models train as in one process"),
        (TakesAll, "both_kinds", "a full-size model can begin on the devices [], not on [0]"),
        (FailsAll, "failures", "trial 1 fails alone"),
        (GivesNoReason, "failures", "a failure says what was raised"),
        (DropsFailedFullSizeModels, "failures", "trial 1 fails alone, not []"),
        (FailsEachFullSizeModel, "failures", "trial 1 fails alone, not [0, 1, 2]"),
        (FailsAll, "deaths", "trial 1 fails alone"),
        (TellsAnEpochLess, "deaths", "the others train on"),
        (HasNoClock, "time", "trial 0 of a group ends after its first epoch"),
        (HasNoClockAtFullSize, "time", "a full-size model ends after its first epoch"),
        (TellsOfTheLastEpochAlone, "race", "epochs are counted up"),
    ],
)
def test_a_broken_backend_is_found_out(
    one_process: None, tmp_path: Path, kind: type[Broken], check: str, promise: str
) -> None:
    with pytest.raises(AssertionError, match=f"a backend breaks its contract: .*{re.escape(promise)}"):
        getattr(backends, f"check_{check}")(lambda: WithDevices(kind), tmp_path)


def test_a_device_that_begins_nothing_is_found_out(
    one_process: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class BeginsNothing(Broken):
        def finished(self) -> Sequence[Finished]:
            return []

    monkeypatch.setattr(backends, "PATIENCE_S", 0.0)
    with pytest.raises(AssertionError, match="a device begins what it is given"):
        backends.check_leaving(lambda: WithDevices(BeginsNothing), tmp_path)


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


def test_a_task_has_a_width_in_the_middle_heat_alone() -> None:
    assert group(0, heat="middle", width=0.25).width == 0.25
    for wrong in ({"width": 0.25}, {"heat": "middle"}, {"heat": "race", "width": 1.0}):
        with pytest.raises(ValueError, match=r"`width` is .*, but must be given in the middle heat, and only there"):
            group(0, **wrong)


def test_results_of_both_members_are_compared(tmp_path: Path) -> None:
    configs = [{"lr": lr, "optimizer": "sgd", "batch_size": 32} for lr in (0.1, 0.01)]
    found = train_two_rungs(LocalBackend(["cpu"]), tmp_path, configs)
    assert {n: [epoch for epoch, _ in history] for n, history in found.items()} == {0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}


def test_a_process_that_ended_is_not_running_whether_it_was_waited_for_or_not() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert is_running(process.pid)
    assert process.stdin
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # leaves a zombie
    assert not is_running(process.pid)
    process.wait()
    assert not is_running(process.pid)
