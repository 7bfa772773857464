"""A fork server on each node: it forks ranks, so that a rank starts in milliseconds instead of seconds.

Most of the time of a resize is spent on importing torch. The server imports it once, loads the training function and
its data once, and forks a fresh rank for each connection. All ranks of a node share the memory pages of the data, but
no rank inherits another's state. The server itself does not train, starts no thread and touches no GPU.

A rank belongs to the process at the other end of its connection: when that end closes, the rank is killed, even if it
hangs. The server ends with its guardian (the node's raylet), or after `IDLE_S` seconds without ranks. It never blocks
on a client: it reads each request as it arrives, so that a stopped client does not delay the others.

Linux only, like a Ray cluster of more than one node.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any

from ray import cloudpickle

from hydro_rasda.backends.ray.fork_client import check_peer
from hydro_rasda.processes.temporary_folders import lives, remove_left

IDLE_S = 60.0
_TICK_MS = 1000
_SILENT_S = 5.0
"""If the client that sends a function is silent for this number of seconds, another client must send the function."""
_KEPT_PAYLOADS = 2


class _ForkServer:
    def __init__(self, path: str, guardian: str) -> None:
        self._guardian = guardian
        self._payloads: OrderedDict[str, Any] = OrderedDict()
        self._coming: dict[str, float] = {}  # maps a digest to the time when its sender was last heard
        self._requests: dict[int, Generator[None]] = {}  # maps a client's file descriptor to its request
        # Maps a rank's pid to this server's copy of the rank's connection to its client, watched only for a hang-up.
        self._ranks: dict[int, Connection] = {}
        self._poll = select.poll()
        self._wake, waker = socket.socketpair()
        self._wake.setblocking(False)
        waker.setblocking(False)
        self._waker = waker
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._path = path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener.bind(path)
        self._listener.listen(256)
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def serve(self) -> None:
        """Fork ranks until the guardian (the node's raylet) ends, or there was no rank or request for `IDLE_S` s."""
        busy_at = time.monotonic()
        while lives(self._guardian) and time.monotonic() - busy_at < IDLE_S:
            for fd, event in self._poll.poll(_TICK_MS):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._wake.fileno():
                    self._wake.recv(4096)
                elif event & (select.POLLHUP | select.POLLERR):
                    self._hang_up(fd)
            # Repeat until no request ends: when one ends, another that waited for the same function may go on.
            while any(map(self._ends, list(self._requests))):
                pass
            self._reap()
            if self._ranks or self._requests:
                busy_at = time.monotonic()
        os.unlink(self._path)
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)
        if not lives(self._guardian):
            time.sleep(_TICK_MS / 1000)  # wait for the trials' actors, which end soon after the guardian
        remove_left()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:  # the client has left already
            return
        try:
            check_peer(client)
        except PermissionError:
            client.close()
            return
        client.setblocking(False)
        self._poll.register(client, select.POLLIN)
        self._requests[client.fileno()] = self._answer(client)

    def _ends(self, fd: int) -> bool:
        """Continue a client's request as far as possible without waiting; return whether it is over."""
        try:
            next(self._requests[fd])
        except StopIteration:
            del self._requests[fd]
            return True
        return False

    def _answer(self, client: socket.socket) -> Generator[None]:
        """Fork the rank that a client asks for, unless the client leaves or the function cannot be loaded."""
        streams, connection, of_rank = list[int](), None, False
        fd = client.fileno()
        try:
            with client:
                while not streams:
                    try:
                        read, streams, _, _ = socket.recv_fds(client, 1, 2)
                    except BlockingIOError:
                        yield
                    else:
                        if not read:
                            return
                connection = Connection(client.detach())
            try:
                digest, job = pickle.loads((yield from _message(fd)))
                payload = yield from self._payload(connection, digest)
                os.set_blocking(fd, True)
            except GeneratorExit:
                raise
            except (EOFError, OSError):
                return
            except BaseException:  # report anything that the user's code raises to the rank's owner
                with contextlib.suppress(OSError):
                    connection.send(("error", traceback.format_exc()))
                return
            pid = os.fork()
            if pid == 0:
                self._become_rank(connection, streams, payload, job)
            self._ranks[pid], connection, of_rank = connection, None, True
            self._poll.register(fd, 0)  # 0: report only hang-ups and errors, which poll always reports
        finally:
            for stream in streams:
                os.close(stream)
            if not of_rank:
                self._poll.unregister(fd)
            if connection is not None:
                connection.close()

    def _payload(self, connection: Connection, digest: str) -> Generator[None, None, Any]:
        while digest not in self._payloads and time.monotonic() - self._coming.get(digest, -math.inf) < _SILENT_S:
            yield
        known = digest in self._payloads
        connection.send(("known" if known else "need", None))
        if not known:

            def heard() -> None:
                self._coming[digest] = time.monotonic()

            heard()
            try:
                received = yield from _message(connection.fileno(), heard)
            finally:
                self._coming.pop(digest, None)
            try:
                self._payloads[digest] = cloudpickle.loads(received)
            except (EOFError, OSError) as error:  # raised by unpickling, not by the connection
                told = f"the training function or its data cannot be loaded on {socket.gethostname()}: {error!r}"
                raise RuntimeError(told) from error
            while len(self._payloads) > _KEPT_PAYLOADS:
                self._payloads.popitem(last=False)
            # Freeze all objects: the garbage collectors of the ranks then leave them alone, so that their pages stay
            # shared.
            gc.collect()
            gc.freeze()
        self._payloads.move_to_end(digest)
        return self._payloads[digest]

    def _become_rank(self, connection: Connection, streams: list[int], payload: Any, job: dict[str, Any]) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._listener, self._wake, self._waker):
                other.close()
            for others in self._ranks.values():
                others.close()
            for client, request in self._requests.items():
                if client != connection.fileno():
                    request.close()
            for target, fd in enumerate(streams, start=1):
                os.dup2(fd, target)
                os.close(fd)
            os.environ.clear()
            os.environ.update(job.pop("environ"))
            os.chdir(job.pop("cwd"))
            from hydro_rasda.backends.ray.rank_worker import run_rank
            from hydro_rasda.data.open_files import open_files_again

            open_files_again()
            run_rank(payload, job, connection)
            code = 0
        except BaseException:
            with contextlib.suppress(OSError):
                connection.send(("error", traceback.format_exc()))
        finally:
            with contextlib.suppress(Exception):  # the user's code may have replaced or closed these files
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _hang_up(self, fd: int) -> None:
        if fd in self._requests:
            self._requests.pop(fd).close()
            return
        for pid, connection in self._ranks.items():
            if connection.fileno() == fd:
                os.kill(pid, signal.SIGKILL)
        self._poll.unregister(fd)

    def _reap(self) -> None:
        while self._ranks:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._ranks.pop(pid, None)
            if connection is None:  # not a rank, but a process that a user's module has started
                continue
            with contextlib.suppress(KeyError):
                self._poll.unregister(connection.fileno())
            connection.close()


def _message(fd: int, heard: Callable[[], None] = lambda: None) -> Generator[None, None, bytearray]:
    """Read one message of a `Connection` as it arrives; raise EOFError if the sender leaves."""
    (length,) = struct.unpack("!i", (yield from _bytes(fd, 4, heard)))
    if length == -1:
        (length,) = struct.unpack("!Q", (yield from _bytes(fd, 8, heard)))
    return (yield from _bytes(fd, length, heard))


def _bytes(fd: int, length: int, heard: Callable[[], None]) -> Generator[None, None, bytearray]:
    found = bytearray(length)
    left = memoryview(found)
    while left:
        try:
            read = os.readv(fd, [left])
        except BlockingIOError:
            yield
            continue
        if not read:
            raise EOFError
        heard()
        left = left[read:]
    return found


def main() -> None:
    """Start the server in the background: `python -m hydro_rasda.backends.ray.fork_server SOCKET GUARDIAN`."""
    path, guardian = sys.argv[1:]
    # When a worker ends, Ray kills its children and its process group. So the server must belong to neither.
    if os.fork():
        os._exit(0)
    os.setsid()

    # Import torch's compiler once, here. Otherwise the first optimizer of each rank would import it, which would take
    # longer than anything else.
    import torch._dynamo  # noqa: F401

    import hydro_rasda.backends.ray.rank_worker  # noqa: F401

    remove_left()
    _ForkServer(path, guardian).serve()


if __name__ == "__main__":
    main()
