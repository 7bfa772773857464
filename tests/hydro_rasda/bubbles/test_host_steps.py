"""A host's steps by the clock, without processes: when its guest is let run, looked after, and started again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydro_rasda.bubbles import host
from hydro_rasda.bubbles.host import Guest
from hydro_rasda.schedulers.bubble_policy import CONTROL, SHORTEST_S
from tests.hydro_rasda.conftest import Clock


class Process:
    """What a host sees of a guest's process."""

    started: list[Process]

    def __init__(self, source: Path, device: str, preempt: bool, before: tuple[str, int]) -> None:
        self.given, self.name, self.pid = (source, device, preempt, before), f"guest {len(self.started)}", 7
        self.page, self.used = SimpleNamespace(working=True), 2.0
        self.over: int | None = None
        self.calls: list[Any] = []
        self.status = 0
        self.started.append(self)

    def tie(self, patience_s: float) -> None:
        self.calls.append(("tie", patience_s))

    def open(self, seconds: float) -> None:
        self.calls.append(("open", seconds))

    def close(self) -> None:
        self.calls.append("close")

    def leave(self, patience_s: float) -> None:
        self.calls.append(("leave", patience_s))

    def end(self) -> int:
        self.calls.append("end")
        return self.status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    Process.started = []
    monkeypatch.setattr(host, "GuestProcess", Process)
    monkeypatch.setattr(host, "available_memory", lambda device: 1000)
    found = Clock()
    monkeypatch.setattr(host, "time", found)
    return found


@pytest.fixture
def guest(clock: Clock, tmp_path: Path) -> Guest:
    made = Guest(tmp_path, torch.device("cpu"), 100, True)
    made.start()
    return made


def step(guest: Guest, clock: Clock, *waits: float, computes: float = 0.0) -> None:
    """A step that waits so long at each of its positions."""

    def passes(seconds: float) -> None:
        clock.now += seconds

    guest.begin_step()
    for position, seconds in enumerate(waits):
        guest.wait(position, lambda seconds=seconds: passes(seconds))  # type: ignore[misc]
    clock.now += computes


def test_a_guest_runs_in_bubbles_that_were_long_enough_so_far(guest: Guest, clock: Clock, tmp_path: Path) -> None:
    (process,) = Process.started
    assert process.given == (tmp_path, "cpu", True, ("", 0))
    assert (guest.pid, guest.working, guest.used) == (7, True, 2.0)
    for _ in range(5):
        step(guest, clock, 0.25, SHORTEST_S / 2)
    assert process.calls == [("tie", 10.0), *[("open", pytest.approx(0.25)), "close"] * 2]
    assert guest.steps == 5
    assert guest.waited == pytest.approx(5 * (0.25 + SHORTEST_S / 2))
    assert guest.open == pytest.approx(2 * 0.25)


def test_waits_count_only_while_there_is_something_to_train(guest: Guest, clock: Clock) -> None:
    (process,) = Process.started
    process.page.working = False
    for _ in range(4):
        step(guest, clock, 0.25)
    assert ("open", pytest.approx(0.25)) in process.calls, "it may look for some"
    assert (guest.waited, guest.open, guest.working) == (0.0, 0.0, False)


def test_a_bubble_that_raises_is_closed(guest: Guest, clock: Clock) -> None:
    for _ in range(3):
        step(guest, clock, 0.25)

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guest.wait(0, fails)
    assert Process.started[0].calls[-1] == "close"


def test_a_paused_guest_is_not_let_run_and_its_steps_are_not_compared(guest: Guest, clock: Clock) -> None:
    guest.paused = True
    for _ in range(2 * CONTROL):
        step(guest, clock, 0.25)
    assert Process.started[0].calls == [("tie", 10.0)]
    assert guest.open == 0.0
    assert guest.cost != guest.cost, "NaN: nothing was measured"


def test_the_cost_is_that_of_steps_with_guests_over_control_steps(guest: Guest, clock: Clock) -> None:
    for at in range(2 * CONTROL + 2):
        # The first step sets the pipeline up, and is not compared; of those that are, every 16th is a control step.
        step(guest, clock, computes=9.0 if at == 0 else 1.0 if at % CONTROL == 0 else 1.005)
    assert guest.cost == pytest.approx(0.005)


def test_a_guest_that_ended_is_replaced_at_the_next_look(guest: Guest, clock: Clock) -> None:
    first = Process.started[0]
    first.over = first.status = -9
    step(guest, clock, computes=0.5)
    assert guest.pid == 7, "not looked at yet"
    clock.now += 1.0
    step(guest, clock)
    assert guest.pid is None
    step(guest, clock, computes=1.0)
    assert guest.pid is None
    step(guest, clock)
    assert guest.pid == 7
    assert [process.given[3] for process in Process.started] == [("", 0), ("guest 0", -9)]
    assert guest.used == 4.0


@pytest.mark.parametrize(("status", "working", "starts"), [(1, False, 3), (0, False, 20), (1, True, 20)])
def test_guests_that_fail_without_work_are_started_three_times(
    guest: Guest, clock: Clock, status: int, working: bool, starts: int
) -> None:
    """A sweep that is over, or a task that ends its process, is no failure of guests."""
    for _ in range(2 * 20 - 1):
        clock.now += 1.0
        last = Process.started[-1]
        last.over, last.page.working = status, working
        step(guest, clock)
    assert len(Process.started) == starts


def test_a_guest_that_cannot_be_started_leaves_its_host_alone(
    guest: Guest, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []

    def fails(source: Path, *_: object) -> None:
        tried.append(source)
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(host, "GuestProcess", fails)
    Process.started[0].over = -9
    step(guest, clock, computes=1.0)
    step(guest, clock, computes=1.0)  # the first one has ended
    for _ in range(3):
        with pytest.warns(UserWarning, match="no guest could be started.*no more processes"):
            step(guest, clock, computes=1.0)
    step(guest, clock)
    assert len(tried) == 3
    assert guest.pid is None


def test_leaving_hands_over_and_ends(guest: Guest, clock: Clock) -> None:
    guest.leave(3.0)
    assert Process.started[0].calls == [("tie", 10.0), ("leave", 3.0), "end"]
    assert (guest.pid, guest.used) == (None, 2.0)
    guest.leave(3.0)
    assert len(Process.started[0].calls) == 3


def test_a_guest_that_is_over_is_not_waited_for(guest: Guest, clock: Clock) -> None:
    Process.started[0].over = 0
    guest.leave(3.0)
    assert Process.started[0].calls == [("tie", 10.0), "end"]


def test_no_guest_is_started_where_memory_is_short(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory", lambda device: 99)
    poor = Guest(tmp_path, torch.device("cpu"), 100, True)
    poor.start()
    assert poor.pid is None
    monkeypatch.setattr(host, "available_memory", lambda device: None)
    poor.start()
    assert poor.pid == 7, "not known: taken to be enough"


def test_a_host_whose_first_guest_cannot_be_started_goes_on(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(host, "GuestProcess", fails)
    schedule = SimpleNamespace(step=lambda: "stepped", _step_microbatches=print)
    told = pytest.warns(UserWarning, match="no guest could be started.*no more processes")
    with told, host.bubbles(schedule, tmp_path / "bubbles", leave_free=0) as guest:
        assert (schedule.step(), guest.pid) == ("stepped", None)


def test_a_schedule_has_the_step_again_that_its_user_gave_it() -> None:
    schedule: Any = SimpleNamespace(step=lambda: "stepped", _step_microbatches=print)
    guest: Any = SimpleNamespace(begin_step=lambda: None)
    before = schedule.step
    with host.watched(schedule, guest), host.watched(schedule, guest):
        assert schedule.step() == "stepped"
    assert schedule.step is before
