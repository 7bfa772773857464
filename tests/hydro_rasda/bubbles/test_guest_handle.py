"""A guest's process, as the kernel sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from hydro_rasda.bubbles import bubbles
from hydro_rasda.bubbles.guest_handle import GuestProcess, SharedPage
from hydro_rasda.bubbles.host import Guest
from hydro_rasda.testing.tiny_runs import is_running

CPU = torch.device("cpu")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 1000
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_guest_runs_in_bubbles_alone(tmp_path: Path) -> None:
    process = GuestProcess(tmp_path, "cpu", preempt=True)
    try:
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        process.tie(600)
        assert process.page.tied
        wait_until(lambda: state_of(process.pid) == "T")
        process.open(0.01)
        wait_until(lambda: state_of(process.pid) != "T")
        process.close()
        wait_until(lambda: state_of(process.pid) == "T")
        times = psutil.Process(process.pid).cpu_times()
        assert process.used == pytest.approx(times.user + times.system)
        process.leave(600)
        assert process.over == 0
        process.open(0.01)  # no signal goes to a process that has ended
        process.close()
    finally:
        process.end()


@pytest.mark.parametrize("preempt", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_only_a_preempted_guest_that_ends_with_its_host_is_stopped(
    preempt: bool, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[signal.Signals]()
    monkeypatch.setattr(GuestProcess, "_signal", lambda process, number: sent.append(number))
    process = GuestProcess.__new__(GuestProcess)
    process._preempt, process.page = preempt, SharedPage.open()
    process.page.tied = tied
    process.close()
    os.close(process.page.handle)
    assert sent == [signal.SIGSTOP] * (preempt and tied)


def test_a_stopped_guest_ends_with_its_host(tmp_path: Path) -> None:
    host = (
        "import sys, time; from pathlib import Path; from hydro_rasda.bubbles.guest_handle import GuestProcess\n"
        "guest = GuestProcess(Path(sys.argv[1]), 'cpu', True); guest.tie(600); print(guest.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", host, tmp_path], stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        pid = int(popen.stdout.readline())
        assert is_running(pid)
        popen.kill()
    wait_until(lambda: not is_running(pid))


def test_a_guest_gives_way_where_the_host_needs_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [100]
    monkeypatch.setattr("hydro_rasda.bubbles.host.available_memory", lambda device: free[0])
    monkeypatch.setattr("hydro_rasda.bubbles.host.LOOK_S", 0)
    guest = Guest(tmp_path, CPU, leave_free=50, preempt=True)
    try:
        guest.start()
        first = guest.pid
        assert first is not None
        for free[0], there in ((49, False), (99, False), (100, True)):
            guest.begin_step()
            assert (guest.pid is not None) == there
            assert guest.pid != first
    finally:
        guest.leave(0)
    assert not is_running(first)


def test_what_is_no_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`schedule`"), bubbles(torch.nn.Linear(1, 1), tmp_path):
        pass
    with pytest.raises(ValueError, match="`leave_free`"), bubbles(object(), tmp_path, leave_free=-1):
        pass
    assert not list(tmp_path.iterdir())
