"""Run pieces of work at the same time on the cores of this machine, each in its own forked process.

Threads do little for small models, because a step is over before a second thread has begun its part. Processes scale
with the cores. Forked processes start in milliseconds, share the memory pages of the data, and need no pickled
arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch

from fusion.width.memory import peak_memory
from hydro_rasda.common.interrupts import interrupts_put_off
from hydro_rasda.data.open_files import open_files_again
from hydro_rasda.processes.child_count import ONE_PROCESS
from hydro_rasda.processes.die_with_parent import depend_on
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.processes.without_compiler import COMPILER, leave_out_compiler
from hydro_rasda.run.checkpoints import DamagedCheckpoint
from hydro_rasda.schedulers.packing_policy import Job, Room, beside

Notify = Callable[..., None]
"""A function that is called with the reports of a piece of work while it runs."""

ForkedWork = Callable[[Notify], Any]
"""Work that calls its argument to report how far it is, and returns its result."""


@dataclass(frozen=True)
class Crowd:
    """Choose the pieces of work that run at the same time, by memory and cores.

    Attributes:
        memory: Bytes for all pieces together. If a piece is expected to take more memory, it runs alone.
        cores: Number of cores for all pieces together.
        expected: The expected peak memory of each piece, in bytes.
        took: Called with a piece's position and its measured peak, once the piece has ended by itself.
        over: Asked repeatedly after the first piece has begun. Once it returns True, no further piece begins.
    """

    memory: float
    cores: int
    expected: Sequence[float]
    took: Callable[[int, int], None]
    over: Callable[[], bool] = lambda: False

    def next(self, waiting: Sequence[int], running: Sequence[int], threads: int) -> list[int]:
        """Return the pieces of `waiting` that start now, each on `threads` threads."""
        jobs = {i: Job(str(i), self.expected[i], threads, 0.0) for i in (*waiting, *running)}
        there = tuple(jobs[i] for i in running)
        memory = self.memory - sum(job.memory for job in there)
        room = Room("", memory, self.cores - threads * len(there), self.cores, there)
        return [int(name) for name in beside([jobs[i] for i in waiting], room)]


@dataclass(frozen=True)
class Died:
    """A piece of work whose process ended without an answer; `how` says why, in words."""

    how: str


LATE = Died("there was no time left for it")


def imap_forked(
    pieces: Sequence[ForkedWork],
    threads: int,
    notify: Notify,
    pace: HangDetector | None = None,
    crowd: Crowd | None = None,
    relayed: RelayedWarnings | None = None,
) -> Iterator[tuple[int, Any]]:
    """Do each piece of work in a forked process; yield its position, and its result or `Died`, when it is done.

    Pieces that still run when the caller stops the iteration are ended. A piece that does not begin, because of
    `crowd.over`, yields nothing. If a piece raises DamagedCheckpoint, so does this function, because the trials that
    the piece trains are not at fault.

    Args:
        threads: Number of torch threads of each piece.
        notify: Called in this process with each report of a piece.
        pace: Decides when a silent piece is ended. None for a new detector, which ends none before a first report.
        crowd: Decides which pieces run at the same time; None for all of them.
        relayed: Holds the warnings that earlier calls gave, so that they are not given again; None if there are none.
    """
    pace, waiting = pace or HangDetector("nothing was said"), list(range(len(pieces)))
    running: dict[Connection, tuple[int, int]] = {}
    heard: dict[Connection, float] = {}
    relayed = relayed or RelayedWarnings()
    try:
        while _are_left(waiting, len(pieces), crowd) or running:
            there = [i for i, _ in running.values()]
            for i in crowd.next(waiting, there, threads) if crowd is not None and waiting else tuple(waiting):
                waiting.remove(i)
                with interrupts_put_off():
                    connection, pid = _forked(pieces[i], threads)
                    running[connection], heard[connection] = (i, pid), time.monotonic()
            left = min(heard[c] for c in running) + pace.patience - time.monotonic()
            ready = wait(list(running), None if left == math.inf else max(0.0, left))
            for connection in [c for c in running if c not in ready and time.monotonic() - heard[c] > pace.patience]:
                i, pid = running.pop(connection)
                _end(connection, pid)
                yield i, Died(pace.told)
            for connection in [connection for connection in running if connection in ready]:
                i, pid = running[connection]
                kind, content = receive(connection)
                if kind == "notified":
                    now = time.monotonic()
                    pace.took(now - heard[connection])
                    heard[connection] = now
                    notify(*content)
                elif kind == "warned":
                    relayed.give(content)
                elif kind == "imported":
                    importlib.import_module(content)
                elif kind == "took":
                    if crowd is not None:
                        crowd.took(i, content)
                else:
                    del running[connection]
                    yield i, _answer(connection, pid, kind, content)
    finally:
        for connection, (_, pid) in running.items():
            _end(connection, pid)


def _are_left(waiting: list[int], pieces: int, crowd: Crowd | None) -> bool:
    """Tell whether pieces are left that may begin. If `crowd.over` returns True, drop the waiting pieces."""
    if crowd is not None and 0 < len(waiting) < pieces and crowd.over():
        waiting.clear()
    return bool(waiting)


def _answer(connection: Connection, pid: int, kind: str, content: Any) -> Any:
    """Wait until a child process has ended, and return the result in its last message, or `Died`."""
    connection.close()
    why = _waited(pid)
    if kind == "damage":
        raise DamagedCheckpoint(content)
    return content if kind == "done" else Died(content or why)


def _end(connection: Connection, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the system has forgotten the process; see `_waited`
        os.kill(pid, signal.SIGKILL)
    _waited(pid)
    connection.close()


def _waited(pid: int) -> str:
    """Wait until a child process has ended, and return in words why."""
    try:
        return ending(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # the system forgets ended children if a program ignores SIGCHLD
        return "an end that nobody saw"


def map_forked(
    pieces: Sequence[Callable[[], Any]], children: int, pace: HangDetector | None = None, until: float = math.inf
) -> list[Any]:
    """Do each piece of work in a forked process with one torch thread, and return the pieces' results in order.

    With `children=0`, this process does the pieces one after another, on its own number of threads. An exception that a
    piece raises then ends the call.

    Args:
        children: Number of processes at the same time. The next `children` pieces begin once all pieces before them
            are over.
        pace: Decides after how many seconds without an answer a process is ended; None to wait until `until`.
        until: Time of the monotonic clock at which child processes are ended. This process finishes the piece that it
            has begun.

    Returns:
        The result of each piece; `Died` for a piece that raised in its process, whose process died, or that was late.
    """
    if not children:
        return [piece() if time.monotonic() < until else LATE for piece in pieces]
    results, pace = dict.fromkeys(range(len(pieces)), LATE), pace or HangDetector("nothing was said")
    for first in range(0, len(pieces), children):
        pace.most = until - time.monotonic()
        if pace.most <= 0:
            break
        together = [partial(_without_reports, piece) for piece in pieces[first : first + children]]
        for i, result in imap_forked(together, 1, _ignore, pace):
            results[first + i] = LATE if isinstance(result, Died) and time.monotonic() >= until else result
    return [results[i] for i in range(len(pieces))]


def _without_reports(piece: Callable[[], Any], notify: Notify) -> Any:
    return piece()


def _ignore(*reported: Any) -> None: ...


def send(connection: Connection, kind: str, content: Any) -> None:
    """Send another process a message of tensors and plain values, or, if `kind` is "warned", of caught warnings."""
    connection.send_bytes(_message(kind, content))


def _message(kind: str, content: Any) -> memoryview:
    if kind == "warned":
        content = [plain_warning(warning) for warning in content]
    buffer = io.BytesIO()
    # Save only results by `torch.save`, because they are large. It takes as long as some training steps, so pickle all
    # other messages.
    (torch.save if kind == "done" else pickle.dump)((kind, content), buffer)
    return buffer.getbuffer()


def plain_warning(warning: warnings.WarningMessage) -> dict[str, Any]:
    """Return a warning as plain values, with a builtin or `fusion` category.

    A user's own warning class may not survive pickling.
    """
    known = next(kind for kind in warning.category.__mro__ if kind.__module__.split(".")[0] in ("builtins", "fusion"))
    text = str(warning.message) if known is warning.category else f"{warning.category.__name__}: {warning.message}"
    return {"message": text, "category": known, "filename": warning.filename, "lineno": warning.lineno}


class RelayedWarnings:
    """Give warnings of other processes in this one. Each distinct warning is given only once, whatever the filters are.

    Otherwise, a warning that concerns all processes would appear once for each process.
    """

    def __init__(self) -> None:
        self._given: set[tuple[Any, ...]] = set()

    def give(self, warned: Iterable[Mapping[str, Any]]) -> None:
        """Give those warnings of another process that were not given before.

        `warned` has the other process's warnings, as `plain_warning` returns them.
        """
        for warning in warned:
            if (content := tuple(warning.values())) not in self._given:
                self._given.add(content)
                warnings.warn_explicit(**warning)


_ARCHIVE = b"PK"
"""Torch's archives begin with these bytes; pickles do not."""


def receive(connection: Connection) -> tuple[str, Any]:
    """Wait for another process's next message and return it; ("died", "") if the process has ended."""
    try:
        received = connection.recv_bytes()
    except (EOFError, OSError):
        return "died", ""
    message: tuple[str, Any]
    if received.startswith(_ARCHIVE):
        message = torch.load(io.BytesIO(received), weights_only=False)
    else:
        message = pickle.loads(received)
    return message


def ending(status: int) -> str:
    """Return in words why a process ended, from the status that `os.waitpid` returned."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return "SIGKILL, as where memory runs out"
    if code >= 0:
        return f"exit code {code}"
    return next((known.name for known in signal.Signals if known == -code), f"signal {-code}")


NO_FORK = (
    "the system starts no further process. End other processes, or raise the limit (`ulimit -u`, or a container's). "
    f"With the environment variable {ONE_PROCESS}=1, a CPU trains in one process. The same call goes on from the last "
    "finished unit of work"
)


def _forked(piece: ForkedWork, threads: int) -> tuple[Connection, int]:
    receiver, sender = Pipe(duplex=False)
    parent = os.getpid()
    _flush_output()  # otherwise, both processes would write the text that is still buffered
    if threads > 1:
        _end_idle_threads()
    with warnings.catch_warnings():
        # Python warns if a process with threads forks. Ignore this warning, because the child replaces torch's threads
        # and does not use the thread of the progress bar.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError as error:
            receiver.close()
            sender.close()
            raise OSError(error.errno, f"{error.strerror}: {NO_FORK}") from error
    if pid == 0:
        receiver.close()
        _run_child(piece, threads, sender, parent)
    sender.close()
    return receiver, pid


def _end_idle_threads() -> None:
    """End the threads that OpenMP keeps for the next operation of this thread. That operation starts new ones.

    GNU's OpenMP still counts these threads in a forked child, where they do not exist. Together with the child's own
    threads, it counts more threads than cores, and lets them sleep between operations instead of spinning. On two cores
    and two threads, a small CNN trained half as fast, and an LSTM slower than on one thread.
    """
    soft = 1  # `omp_pause_soft` of OpenMP 5.0, section 3.2.44
    with contextlib.suppress(AttributeError):  # an older OpenMP runtime lacks the function
        ctypes.CDLL(None).omp_pause_resource_all(soft)


def _run_child(piece: ForkedWork, threads: int, connection: Connection, parent: int) -> NoReturn:
    there = COMPILER in sys.modules
    leave_out_compiler()

    def work() -> None:
        torch.set_num_threads(threads)
        try:
            open_files_again()
            with warnings.catch_warnings(record=True) as caught, peak_memory(torch.device("cpu")) as peak:
                answer = _message("done", piece(lambda *content: send(connection, "notified", content)))
            send(connection, "warned", caught)
            if COMPILER in sys.modules and not there:
                send(connection, "imported", COMPILER)
            send(connection, "took", peak.bytes)
            connection.send_bytes(answer)
        except DamagedCheckpoint as damage:
            send(connection, "damage", str(damage))
        except BaseException:
            send(connection, "died", traceback.format_exc())

    try:
        depend_on(parent)
        # The garbage collector must not touch inherited objects, so that their memory pages stay shared.
        gc.freeze()
        if threads == 1:
            work()
        else:
            # OpenMP still counts on this thread's worker threads, although the fork lost them. So the work runs in a
            # new thread, which gets its own worker threads.
            worker = threading.Thread(target=work)
            worker.start()
            worker.join()
    finally:
        _flush_output()
        os._exit(0)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The stream may be closed or None, its reader may have gone, and user code may have replaced it by anything.
        with contextlib.suppress(Exception):
            stream.flush()
