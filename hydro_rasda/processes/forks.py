"""Pieces of work at the same time on the cores of this machine, each in a process forked for it.

Threads do little for small models: a step is over before a second thread has begun its part. Processes scale, and
forked ones start in milliseconds, share the data's memory pages and need nothing pickled on their way in.
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
from hydro_rasda.data.open_files import open_files_again
from hydro_rasda.processes.die_with_parent import depend_on
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.processes.without_compiler import COMPILER, leave_out_compiler
from hydro_rasda.run.checkpoints import DamagedCheckpoint
from hydro_rasda.schedulers.packing_policy import Job, Room, beside

Notify = Callable[..., None]
"""Takes whatever a piece of work reports while it runs."""

ForkedWork = Callable[[Notify], Any]
"""Work that reports how far it is by calling its argument, and returns its result."""


@dataclass(frozen=True)
class Crowd:
    """Choose the pieces that run beside each other: those that fit memory and cores together, the others after them.

    A piece that is `expected` to take more bytes at its peak than all may runs alone. `took` is told which piece took
    how many, once it has ended by itself.
    """

    memory: float
    cores: int
    expected: Sequence[float]
    took: Callable[[int, int], None]

    def next(self, waiting: Sequence[int], running: Sequence[int], threads: int) -> list[int]:
        """Those that start now, on so many threads each."""
        jobs = {i: Job(str(i), self.expected[i], threads, 0.0) for i in (*waiting, *running)}
        there = tuple(jobs[i] for i in running)
        memory = self.memory - sum(job.memory for job in there)
        room = Room("", memory, self.cores - threads * len(there), self.cores, there)
        return [int(name) for name in beside([jobs[i] for i in waiting], room)]


@dataclass(frozen=True)
class Died:
    """A piece of work whose process ended without an answer."""

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
    """Do all pieces of work at the same time, or as many of them as have room beside each other, in any order.

    Each has so many threads of torch. Yield, as they are done, a piece's position and what it returned, or that it
    `Died`. `pace` ends those that are silent for too long; None waits for ever. `crowd` says which have room beside
    each other; None: all. `relayed` has the warnings that earlier calls gave. Pieces that still run when the caller
    takes no more are ended. DamagedCheckpoint if a piece raised it, which is no fault of what it trains.
    """
    pace, waiting = pace or HangDetector("nothing was said"), list(range(len(pieces)))
    running: dict[Connection, tuple[int, int]] = {}
    heard: dict[Connection, float] = {}
    relayed = relayed or RelayedWarnings()
    try:
        while running or waiting:
            there = [i for i, _ in running.values()]
            for i in crowd.next(waiting, there, threads) if crowd is not None and waiting else tuple(waiting):
                waiting.remove(i)
                with _interrupts_put_off():
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


def _answer(connection: Connection, pid: int, kind: str, content: Any) -> Any:
    """Return the result in a child's last message, once the child has ended."""
    connection.close()
    _, status = os.waitpid(pid, 0)
    if kind == "damage":
        raise DamagedCheckpoint(content)
    return content if kind == "done" else Died(content or ending(status))


def _end(connection: Connection, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    connection.close()


def map_forked(
    pieces: Sequence[Callable[[], Any]], children: int, pace: HangDetector | None = None, until: float = math.inf
) -> list[Any]:
    """Do pieces of work on one thread each, so many at the same time; with 0, in this process.

    Those that die give `Died`, also those that are not done at `until`, by the monotonic clock. In this process, one
    that has begun goes on.
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
    """Send another process a message; tensors and plain values, or of "warned" what was caught."""
    connection.send_bytes(_message(kind, content))


def _message(kind: str, content: Any) -> memoryview:
    if kind == "warned":
        content = [plain_warning(warning) for warning in content]
    buffer = io.BytesIO()
    # Only results are large. An archive of torch's takes as long as some steps of a small model.
    (torch.save if kind == "done" else pickle.dump)((kind, content), buffer)
    return buffer.getbuffer()


def plain_warning(warning: warnings.WarningMessage) -> dict[str, Any]:
    """A warning as text, of a class that is here: one of the user's own may not come out of a pickle as it went in."""
    known = next(kind for kind in warning.category.__mro__ if kind.__module__.split(".")[0] in ("builtins", "fusion"))
    text = str(warning.message) if known is warning.category else f"{warning.category.__name__}: {warning.message}"
    return {"message": text, "category": known, "filename": warning.filename, "lineno": warning.lineno}


class RelayedWarnings:
    """Warnings of other processes, given again here: the same one once, also where filters ask for repetitions.

    Each process warns of what all of them meet.
    """

    def __init__(self) -> None:
        self._given: set[tuple[Any, ...]] = set()

    def give(self, warned: Iterable[Mapping[str, Any]]) -> None:
        """Give those that are new, as `plain_warning` describes them."""
        for warning in warned:
            if (content := tuple(warning.values())) not in self._given:
                self._given.add(content)
                warnings.warn_explicit(**warning)


_ARCHIVE = b"PK"
"""Archives of torch's begin with it; pickles do not."""


def receive(connection: Connection) -> tuple[str, Any]:
    """The next message of another process, ("died", "") where it has ended; waits for it."""
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
    """Say in words why a process ended, by the status that `os.waitpid` gave."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return "SIGKILL, as where memory runs out"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@contextlib.contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """Ctrl-C takes effect afterwards: Python ignores what is raised by the functions that it calls around a fork."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *given: caught.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if caught and callable(before):
        before(*caught[0])


def _forked(piece: ForkedWork, threads: int) -> tuple[Connection, int]:
    receiver, sender = Pipe(duplex=False)
    parent = os.getpid()
    # What is buffered would be written twice.
    with contextlib.suppress(BrokenPipeError):  # nobody reads it
        sys.stdout.flush()
        sys.stderr.flush()
    if threads > 1:
        _end_idle_threads()
    with warnings.catch_warnings():
        # The process has threads, of which Python warns: torch's, which the child replaces, and the progress bar's.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        receiver.close()
        _run_child(piece, threads, sender, parent)
    sender.close()
    return receiver, pid


def _end_idle_threads() -> None:
    """End the threads that OpenMP keeps for this one's next operation; that one starts them again.

    GNU's runtime goes on counting them in a forked child, where they do not exist. With the child's own, it counts more
    threads than cores. It then lets them sleep rather than spin from one operation to the next. On two cores and two
    threads, a small CNN trained half as fast, and an LSTM slower than on one thread.
    """
    soft = 1  # OpenMP 5.0, section 3.2.44
    with contextlib.suppress(AttributeError):  # another runtime, older than that
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
        # What was there before is left alone by the collector here, so that its pages stay shared.
        gc.freeze()
        if threads == 1:
            work()
        else:
            # OpenMP takes the threads that this one had before the fork for living; another one gets its own.
            worker = threading.Thread(target=work)
            worker.start()
            worker.join()
    finally:
        with contextlib.suppress(Exception):  # the user's code may have put anything in their place
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
