"""The needs of a running job, from what the kernel tells of its processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hydro_rasda.packing import Device, Estimate, Task, job_process, nvml
from hydro_rasda.packing.job_process import SETTLED_S, Process


class Machine:
    """The clock, and what is told of a job's only process."""

    now = 100.0
    cpu = 0.0
    in_queues = 0.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(job_process, "monotonic", lambda: found.now)
    monkeypatch.setattr(job_process, "start_child", lambda *_: SimpleNamespace(pid=os.getpid(), wait=lambda: 0))
    monkeypatch.setattr(job_process, "_tree", lambda pid: [psutil.Process(pid)])
    monkeypatch.setattr(job_process, "_cpu_seconds", lambda process: found.cpu)
    monkeypatch.setattr(job_process, "_seconds_in_queues", lambda pid: found.in_queues)
    return found


@pytest.fixture
def process(machine: Machine) -> Process:
    grid: Any = SimpleNamespace(**dict.fromkeys(("lock", "end_file", "log"), Path))
    return Process(Task(["true"], name="job"), Device("cpu", 1e12, 2), grid, 1e12, {})


def test_time_in_which_a_job_waits_for_a_core_does_not_count(machine: Machine, process: Process) -> None:
    """In the first 10 s, it waits for 4 s: on a free core, it would take 0.6 of the time."""
    machine.now += 10.0
    machine.cpu, machine.in_queues = 1.5, 4.0
    process.look(0)
    assert process.so_far() == Estimate(), "not known yet"
    machine.now += SETTLED_S - 10.0
    machine.cpu = 3.0
    process.look(0)
    found = process.so_far()
    assert found.share == pytest.approx(3.0 / (0.6 * 20.0))
    assert found.seconds is None
    assert found.memory == process.memory > 0
    whole = process.in_all({"exit": 0, "seconds": 30.0, "cpu": 6.0, "memory": 1e11})
    assert whole.memory == 1e11
    assert whole.share == pytest.approx(6.0 / 18.0)
    assert whole.seconds == pytest.approx(18.0)
    process.reap()


def test_a_job_that_only_waits_is_taken_to_need_a_tenth_of_the_time(machine: Machine, process: Process) -> None:
    machine.now += 10.0
    machine.in_queues = 10.0
    process.look(0)
    whole = process.in_all({"exit": 0, "seconds": 20.0, "cpu": 0.0, "memory": 0.0})
    assert whole.share == 0.01
    assert whole.seconds == pytest.approx(2.0)
    process.reap()


def test_a_share_is_relative_to_a_gpu_of_compute_1(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps a GPU of twice the speed busy for 30 % takes 60 % of another one."""
    monkeypatch.setattr(nvml, "memory_of", lambda gpu, pids: 1e6)
    monkeypatch.setattr(nvml, "share_of", lambda gpu, pids, jobs: 0.3)
    grid: Any = SimpleNamespace(**dict.fromkeys(("lock", "end_file", "log"), Path))
    process = Process(Task(["true"], name="job"), Device("gpu-0", 1e12, 2.0, gpu="GPU-0"), grid, 1e12, {})
    process.look(0)
    whole = process.in_all({"exit": 0, "seconds": 20.0, "cpu": 0.0, "memory": 0.0})
    assert whole.share == pytest.approx(0.6)
    process.reap()


@pytest.mark.parametrize("listed", [True, False])
def test_descendants_are_found_whether_the_kernel_lists_children_or_not(
    monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    there = Path.exists
    if not listed:
        monkeypatch.setattr(Path, "exists", lambda path: path.name != "children" and there(path))
    # The shell says when its child is there, and waits for it.
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        (child,) = job_process._tree(shell.pid)
        assert child.ppid() == shell.pid
        child.kill()
    assert job_process._tree(shell.pid) == []


def test_the_time_of_children_that_have_ended_is_their_parents() -> None:
    def ended() -> None:
        raise psutil.NoSuchProcess(7)

    times = SimpleNamespace(user=1.0, system=2.0, children_user=4.0, children_system=8.0)
    runs: Any = SimpleNamespace(cpu_times=lambda: times)
    over: Any = SimpleNamespace(cpu_times=ended)
    assert job_process._cpu_seconds(runs) == 15.0
    assert job_process._cpu_seconds(over) == 0.0
