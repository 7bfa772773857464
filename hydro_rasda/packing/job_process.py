"""One job while it runs: its processes, and their measured memory and compute."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic

import psutil

from hydro_rasda.common.import_path import import_path
from hydro_rasda.packing import nvml
from hydro_rasda.packing.devices import Device
from hydro_rasda.packing.job_states import Grid, JobEnd
from hydro_rasda.packing.tasks import Estimate, Task, pickled
from hydro_rasda.run.files import open_to_write

_HERE = Path(__file__).parent
_CHILD, _CALL = _HERE / "run_job.py", _HERE / "call_function.py"

SETTLED_S = 20.0
"""Seconds after which the needs of a running job are recorded. By then, its data are loaded and its steps are alike."""


class Process:
    """A started job with all its processes; `shared` has the environment variables by which it shares a device.

    `memory` is the peak of bytes so far, and `now` is the bytes at the last call of `look`. `expected` is the number of
    bytes that was estimated when the job began. `untold` is True if the GPU's driver does not report the job's memory.
    `over` is a file descriptor that becomes readable once no process of the job is left.
    """

    def __init__(self, task: Task, device: Device, grid: Grid, expected: float, shared: Mapping[str, str]) -> None:
        self.task, self.device, self.expected = task, device, expected
        self.memory = self.now = 0.0
        self.stopped = self.untold = False
        self._began = monotonic()
        self._cpu = self._waited = 0.0
        self._busy: list[float] = []  # samples of the share of the GPU that the job keeps busy
        self._resident = Resident()
        environment = {**os.environ, **device.environment, **shared}
        command = _command(task, grid)
        if callable(task.run):
            environment["PYTHONPATH"] = import_path()
        files = grid.lock(task.name), grid.end_file(task.name)
        self._child = start_child(command, *files, grid.log(task.name), environment)
        self.over = os.pidfd_open(self._child.pid)

    def look(self, beside: int) -> None:
        """Measure the processes of the job now; `beside` is the number of other jobs on the device."""
        tree = _tree(self._child.pid)
        self._cpu = max(self._cpu, sum(_cpu_seconds(process) for process in tree))
        waited = max((_seconds_in_queues(process.pid) for process in tree), default=0.0)
        self._waited = max(self._waited, waited / max(monotonic() - self._began, waited, 1e-9))
        if self.device.gpu:
            pids = [process.pid for process in tree]
            held = nvml.memory_of(self.device.gpu, pids)
            busy = nvml.share_of(self.device.gpu, pids, 1 + beside)
            self._busy += [] if busy is None else [busy]
        else:
            held = self._resident(tree)
        self.untold = held is None
        if held is not None:
            self.holds(held)

    def holds(self, memory: float) -> None:
        """Record that the processes of the job hold `memory` bytes now, and raise their peak to it."""
        self.now = memory
        self.memory = max(self.memory, memory)

    @property
    def seconds(self) -> float:
        """Seconds since the start of the job."""
        return monotonic() - self._began

    def so_far(self) -> Estimate:
        """Return the needs measured so far; in the first `SETTLED_S`, only the memory, if it exceeds `expected`."""
        if self.seconds >= SETTLED_S:
            return self._measured(self._alone(self.seconds), self._cpu)
        return Estimate(memory=self.memory if self.memory > self.expected else None)

    def in_all(self, end: JobEnd) -> Estimate:
        """Return the needs of the job over its whole run, from the numbers `end` that `run_job.py` wrote at its end.

        On CPUs, the memory is at least that of the job's largest process, even if the job ended before the first look.
        """
        if not self.device.gpu:
            self.memory = max(self.memory, end["memory"])
        seconds = self._alone(end["seconds"])
        measured = self._measured(seconds, end["cpu"])
        return Estimate(measured.memory, measured.share, max(seconds, 1e-3))

    def _alone(self, seconds: float) -> float:
        return seconds * (1 - min(self._waited, _MOST_WAITED))

    def _measured(self, seconds: float, cpu: float) -> Estimate:
        if self.device.gpu:
            # A share is relative to a GPU of compute 1, on which the job would be busy for longer.
            share = self.device.compute * sum(self._busy) / len(self._busy) if self._busy else None
        else:
            share = cpu / seconds if seconds > 0 else None
        return Estimate(self.memory or None, max(share, _LEAST) if share is not None else None)

    def stop(self) -> None:
        """Tell the job to end, unless it was told before; `run_job.py` kills all of its processes."""
        if not self.stopped:
            self.stopped = True
            self._child.terminate()

    def reap(self) -> int:
        """Wait for the end of `run_job.py`, which has ended or is about to, and return its exit status."""
        status = self._child.wait()
        os.close(self.over)
        return status


_LEAST = 0.01
"""The least share of a device that a job is assumed to keep busy."""

_MOST_WAITED = 0.9
"""Largest share of a job's run time that is subtracted because the job waited for a core. If the job waited longer, its
own speed is unknown."""


def start_child(
    command: Sequence[str], lock: Path, end: Path, log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Run a command under `run_job.py`, so that all its processes end if this process ends.

    `lock` is locked as long as any process of the command exists. `end` is written if the command ends by itself.
    """
    with open_to_write(log, inside=2) as output:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), str(lock), str(end), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )


def _command(task: Task, grid: Grid) -> list[str]:
    if not callable(task.run):
        return list(task.run)
    function, value = grid.call_file(task.name, "pickle"), grid.call_file(task.name, "json")
    with open_to_write(function, inside=2) as file:
        file.write(pickled(task))
    return [sys.executable, str(_CALL), str(function), str(value)]


def _tree(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process.

    Only their own files are read, since `psutil` would read those of all processes of the machine, for each job. Some
    kernels do not list a thread's children.
    """
    if not Path("/proc/thread-self/children").exists():
        with contextlib.suppress(psutil.NoSuchProcess):
            return list(psutil.Process(pid).children(recursive=True))
        return []
    found, left = [], [pid]
    while left:
        for child in _children(left.pop()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(child))
                left.append(child)
    return found


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                yield from map(int, (thread / "children").read_text().split())


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        used = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(used.user + used.system + used.children_user + used.children_system)


def _seconds_in_queues(pid: int) -> float:
    """Return the seconds in which a process was ready to run but waited for a core; 0 if the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # the process has ended, or the kernel does not measure this time
        return 0.0


class Resident:
    """Measures the bytes that processes hold together. A page that forked processes share counts once.

    Finding shared pages is slow, because the kernel walks all pages. So it gets at most a twentieth of the time. In
    between, the sum of the processes' memory is scaled by the last measured ratio.
    """

    def __init__(self) -> None:
        self._part, self._again = 1.0, 0.0

    def __call__(self, tree: Sequence[psutil.Process]) -> float:
        total = sum(map(_resident, tree))
        if len(tree) < 2 or total == 0:
            return total
        began = monotonic()
        if began >= self._again:
            self._part = sum(map(_part_of_shared, tree)) / total
            self._again = began + 20 * (monotonic() - began)
        return total * self._part


def _part_of_shared(process: psutil.Process) -> float:
    """Return the bytes of a process, each page divided by the number of processes that have it."""
    try:
        told = re.search(r"^Pss: *(\d+) kB", Path(f"/proc/{process.pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:  # the process has ended, or its file is missing or not readable
        told = None
    return 1024.0 * int(told[1]) if told else _resident(process)


def _resident(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss)
    except psutil.Error:
        return 0.0
