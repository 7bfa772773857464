"""A guest as its host sees it: a process that runs only while the host lets it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from hydro_rasda.common.import_path import import_path

_TICKS = os.sysconf("SC_CLK_TCK")
_GUEST = "from hydro_rasda.bubbles.guest import begin; begin({}, {}, {!r}, {!r}, {!r}, {!r}, {!r})"

HOSTS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_")
"""Prefixes of environment variables that a guest does not get, so that it cannot join the host's process groups."""


class SharedPage(ctypes.Structure):
    """A page of memory that a host and its guest share, for messages without a system call."""

    _fields_ = (*((name, ctypes.c_int64) for name in ("tied", "working", "leaving")), ("until", ctypes.c_double))
    handle: int
    tied: bool
    """True once the guest is sure to end with its host. If it were stopped before, it could stay stopped forever."""
    working: bool
    """True if the guest has something to train."""
    leaving: bool
    """True if the guest is to end after its current epoch."""
    until: float
    """When the open bubble is expected to end, by the system's monotonic clock; 0 if no bubble is open."""

    @classmethod
    def open(cls, handle: int | None = None) -> SharedPage:
        """Open the page of another process by its handle; with None, make a new page."""
        made = os.memfd_create("bubbles") if handle is None else handle
        if handle is None:
            os.ftruncate(made, mmap.PAGESIZE)
        page = cls.from_buffer(mmap.mmap(made, mmap.PAGESIZE))
        page.handle = made
        return page


class GuestProcess:
    """One guest process, from its start to its end. Linux only.

    With `preempt`, the kernel stops the guest within microseconds, so that its work cannot outlast a bubble. The guest
    also has the lowest scheduling class, so that the host's threads run at once. Work on a GPU cannot be stopped.
    Before each quantum (see `Quanta`), a guest on a GPU reads the expected end of the bubble from the page. The guest
    tells the tuner how the guest `before` ended, because the task of that guest may have been the cause.
    """

    def __init__(self, source: Path, device: str, preempt: bool, before: tuple[str, int] = ("", 0)) -> None:
        self.page, self.name = SharedPage.open(), uuid.uuid4().hex
        self._preempt = preempt
        self._used = 0.0
        environment = {name: value for name, value in os.environ.items() if not name.startswith(HOSTS_OWN)}
        environment |= {"PYTHONPATH": import_path(), "OMP_WAIT_POLICY": "PASSIVE"}
        code = _GUEST.format(self.page.handle, os.getpid(), str(source), device, preempt, self.name, before)
        self._popen = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[self.page.handle],
            env=environment,
            start_new_session=True,  # so that Ctrl-C reaches only the host
        )
        with contextlib.suppress(OSError):  # the system refuses SCHED_IDLE, or the guest has ended
            os.sched_setscheduler(self._popen.pid, os.SCHED_IDLE, os.sched_param(0))

    def open(self, seconds: float) -> None:
        self.page.until = time.monotonic() + seconds
        if self._preempt:
            self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.page.until = 0
        if self._preempt and self.page.tied:
            self._signal(signal.SIGSTOP)

    def tie(self, patience_s: float) -> None:
        """Wait until the guest is sure to end with this process, then let it train only in bubbles.

        Wait at most `patience_s`. If the guest is not sure to end by then, it is not stopped (see `SharedPage.tied`).
        """
        until = time.monotonic() + patience_s
        while not self.page.tied and self.over is None and time.monotonic() < until:
            time.sleep(1e-3)
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        # The signal reaches no other process: the kernel keeps the pid until this process has waited for the guest.
        if self._popen.returncode is None:
            os.kill(self._popen.pid, number)

    @property
    def over(self) -> int | None:
        """The exit status of the guest, as in `subprocess`; None while it runs."""
        return self._popen.poll()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def used(self) -> float:
        """Seconds of CPU time of the guest, over all its threads."""
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self._popen.pid}/stat").read_text().rpartition(")")[2].split()
            self._used = max(self._used, (int(fields[11]) + int(fields[12])) / _TICKS)
        return self._used

    def leave(self, patience_s: float) -> None:
        """Let the guest finish its epoch, send its training to the tuner, and end; wait at most `patience_s`."""
        self.page.leaving = True
        self.open(patience_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(patience_s)

    def end(self) -> int:
        """Kill the guest and return its exit status; its memory is free when this returns."""
        self._used = self.used
        self._popen.kill()
        status = self._popen.wait()
        os.close(self.page.handle)
        return status
