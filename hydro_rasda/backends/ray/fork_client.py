"""The client side of the node's fork server (`hydro_rasda.backends.ray.fork_server`): it lets the server start a rank.

This file is pickled by value; see `hydro_rasda.backends.ray.elastic_trainable` for the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from ray import cloudpickle

from hydro_rasda.processes.temporary_folders import owner

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules[owner.__module__])

_START_S = 120.0
_LONGEST_PATH = 107  # bytes of a socket's path


@contextlib.contextmanager
def fork_rank(digest: str, payload: Any, job: dict[str, Any]) -> Iterator[Connection]:
    """Let the node's fork server start a rank; yield a connection to it. When the context ends, so does the rank."""
    # All ranks work in the folder of rank 0, if their node has it.
    folder = job.get("cwd", "")
    job = {**job, "environ": dict(os.environ), "cwd": folder if os.path.isdir(folder) else os.getcwd()}
    connection, answer = _handshake(_socket_path(job["ray_job"]), (digest, job), time.monotonic() + _START_S)
    with connection:
        if answer == "need":
            connection.send_bytes(payload)
        yield connection


def receive(connection: Connection) -> tuple[str, Any]:
    """Return the next message of a rank: its kind and content; ("died", "") if the rank has ended."""
    try:
        message: tuple[str, Any] = connection.recv()
    except (EOFError, OSError):
        return "died", ""
    return message


def _handshake(path: str, request: tuple[str, dict[str, Any]], deadline: float) -> tuple[Connection, str]:
    while True:
        connection = _connect(path, deadline)
        try:
            # Plain pickle refuses functions and classes of scripts, which a configuration may hold.
            connection.send_bytes(cloudpickle.dumps(request))
            return connection, connection.recv()[0]
        except (EOFError, OSError):
            connection.close()  # the fork server was idle and has just ended; the next one will answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"the fork server on {socket.gethostname()} did not answer for {_START_S} s")


def _connect(path: str, deadline: float) -> Connection:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueError(
            f"`TMPDIR` is {tempfile.gettempdir()!r}, but must be shorter: the path of a socket in it has "
            f"{len(os.fsencode(path))} bytes, and at most {_LONGEST_PATH} are allowed"
        )
    while True:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(path)
            check_peer(client)
            # The rank inherits this process's output, so that Ray shows what the training function prints.
            socket.send_fds(client, [b"2"], [1, 2])
            return Connection(client.detach())
        except PermissionError:
            client.close()
            raise
        except OSError:
            client.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no fork server came up on {socket.gethostname()} in {_START_S} s; see {path}.log")
        _start_fork_server(path)
        time.sleep(0.02)


def _socket_path(ray_job: str) -> str:
    """Return the path of the fork server's socket: one for each user, Ray job and Python path of a node.

    Each job has its own server, because a server keeps the modules that it has imported, and a script may be edited
    before its next job.
    """
    key = repr((os.getppid(), ray_job, sys.executable, sys.path))
    return os.path.join(_private_folder(), hashlib.sha256(key.encode()).hexdigest()[:16])


def _private_folder() -> str:
    """Return a folder that only this user can enter, the same for all processes of a node.

    Other users may create files beside it. Their files and links are ignored, and cannot block this one.
    """
    root = os.environ.get("XDG_RUNTIME_DIR", "")
    if not _is_private(root):
        root = tempfile.gettempdir()
    prefix = f"hydro_rasda-{os.getuid()}-"
    for made in (False, True):
        mine = sorted(entry.path for entry in os.scandir(root) if entry.name.startswith(prefix))
        if found := next(filter(_is_private, mine), None):
            return found
        if not made:
            tempfile.mkdtemp(prefix=prefix, dir=root)
    raise PermissionError(f"no folder of this user's alone can be made in {root}")


def _is_private(path: str) -> bool:
    """Return whether a path is a folder of this user (not a link) that nobody else can enter."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def check_peer(connected: socket.socket) -> None:
    """Refuse another user's process as a peer, because unpickling its messages would run its code."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise PermissionError(f"process {pid} at the other end of a fork server's socket is of another user ({uid})")


def _start_fork_server(path: str) -> None:
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # A fork server holds the lock from its start to its end. So one is coming up, or is about to end.
        os.close(lock)
        return
    command = [sys.executable, "-m", "hydro_rasda.backends.ray.fork_server", path, owner(os.getppid())]
    # Let numeric libraries use one thread, because a thread pool that they start on import does not survive a fork.
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if isinstance(path, str)),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Without this, a user's module that calls `torch.cuda.is_available()` would keep all forks from using a GPU.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    with open(f"{path}.log", "ab") as log:
        # The server inherits the lock through `pass_fds`, and holds it until it ends.
        subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock,), check=True
        )
    os.close(lock)
