"""How a trial's actors have the node's fork server (`hydro_rasda.backends.ray.fork_server`) start a rank.

Pickled by value, for the reason that `hydro_rasda.backends.ray.elastic` gives.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from ray import cloudpickle

cloudpickle.register_pickle_by_value(sys.modules[__name__])

_START_S = 120.0


@contextlib.contextmanager
def fork_rank(digest: str, payload: Any, job: dict[str, Any]) -> Iterator[Connection]:
    """A connection to a new rank, which ends with it."""
    job = {**job, "environ": dict(os.environ), "cwd": os.getcwd()}
    connection, answer = _handshake((digest, job), time.monotonic() + _START_S)
    with connection:
        if answer == "need":
            connection.send_bytes(payload)
        yield connection


def receive(connection: Connection) -> tuple[str, Any]:
    """The next message of a rank: its kind and content; ("died", "") after its last."""
    try:
        message: tuple[str, Any] = connection.recv()
    except (EOFError, OSError):
        return "died", ""
    return message


def _handshake(request: tuple[str, dict[str, Any]], deadline: float) -> tuple[Connection, str]:
    while True:
        connection = _connect(deadline)
        try:
            connection.send(request)
            return connection, connection.recv()[0]
        except (EOFError, OSError):
            connection.close()  # a fork server that ended as idle just then; the next one will answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"the fork server on {socket.gethostname()} did not answer for {_START_S} s")


def _connect(deadline: float) -> Connection:
    path = _socket_path()
    while True:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(path)
            # The rank writes where this process does, so that Ray shows what the training function prints.
            socket.send_fds(client, [b"2"], [1, 2])
            return Connection(client.detach())
        except OSError:
            client.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no fork server came up on {socket.gethostname()} in {_START_S} s; see {path}.log")
        _start_fork_server(path)
        time.sleep(0.02)


def _socket_path() -> str:
    """One fork server for each user, Ray session and Python path on a node."""
    folder = os.path.join(tempfile.gettempdir(), f"hydro_rasda-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    owned = os.stat(folder)
    if owned.st_uid != os.getuid() or owned.st_mode & 0o077:
        raise PermissionError(f"{folder} must belong to this user alone: whoever writes there can run code")
    key = repr((os.getppid(), sys.executable, sys.path))
    return os.path.join(folder, hashlib.sha256(key.encode()).hexdigest()[:16])


def _start_fork_server(path: str) -> None:
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)  # somebody else's is on its way
        return
    command = [sys.executable, "-m", "hydro_rasda.backends.ray.fork_server", path, str(os.getppid())]
    # One thread each: numeric libraries that start a pool on import would not survive the forks.
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with open(f"{path}.log", "ab") as log:
        subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock,), check=True
        )
    os.close(lock)
