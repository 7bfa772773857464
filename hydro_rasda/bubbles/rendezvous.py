"""Guests find their sweep by a file, in a folder that guests and tuner both see. Needs no torch.

::

    source/
        sweep.json        the address of the tuner, and the key by which tuner and guest authenticate each other
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from threading import Thread

from hydro_rasda.common.argument_checks import require
from hydro_rasda.run.files import make_private, read_json, refuse_open_to_others, write_atomically

MEETING = "sweep.json"

_GREET_S = 60.0

_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Socket options that end a connection two minutes after the other machine has lost power or its network."""


class Silent(OSError):
    """A program listens at the address of a sweep, but does not answer as a sweep does."""


class Rendezvous:
    """Let guests connect to a sweep. `come_in` is called with each guest's connection, in a separate thread.

    Raises ValueError if another sweep uses the folder, and `Silent` if a program listens at its address but does not
    answer.
    """

    def __init__(self, source: Path, come_in: Callable[[Connection], None]) -> None:
        make_private(source)
        refuse_open_to_others(source)
        self._file = source / MEETING
        require(
            not _answers(source), "source", str(source), "a folder of one sweep at a time: another has guests there"
        )
        self._key, self._come_in = secrets.token_bytes(32), come_in
        self._closed = False
        self._server = socket.create_server(("", 0))
        where = {"host": socket.gethostname(), "port": self._server.getsockname()[1], "key": self._key.hex()}
        mask = os.umask(0o077)
        try:
            write_atomically(self._file, json.dumps(where).encode())
        finally:
            os.umask(mask)
        Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while not self._closed:
            try:
                came, _ = self._server.accept()
            except OSError:  # the server is closed, or the process has too many open files
                time.sleep(0.1)
                continue
            Thread(target=self._greet, args=[came], daemon=True).start()

    def _greet(self, came: socket.socket) -> None:
        connection = _kept_alive(came)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
        except Exception:  # the other side does not have the key, or has ended
            connection.close()
            return
        self._come_in(connection)

    def close(self) -> None:
        self._closed = True
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._server.close()


def _answers(source: Path) -> bool:
    try:
        connect(source).close()
    except Silent:
        raise
    except (OSError, ValueError, KeyError):
        return False
    return True


def connect(source: Path) -> Connection:
    """Connect to the sweep whose address is in the folder `source`.

    Raises OSError if there is no sweep, `Silent` if it does not answer, and ValueError or KeyError if its file is
    damaged.
    """
    where = read_json(source / MEETING)
    host = "127.0.0.1" if where["host"] == socket.gethostname() else where["host"]
    came = socket.create_connection((host, where["port"]), timeout=_GREET_S)
    came.settimeout(None)
    connection = _kept_alive(came)
    key = bytes.fromhex(where["key"])
    if not connection.poll(_GREET_S):
        connection.close()
        told = f"the program at port {where['port']} of {where['host']} does not answer"
        raise Silent(f"{told}: end it, or remove {source / MEETING}")
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except Exception as error:
        connection.close()
        raise OSError(f"{source / MEETING} is of a sweep that has ended") from error
    return connection


def _kept_alive(came: socket.socket) -> Connection:
    with contextlib.suppress(OSError, AttributeError):  # the system lacks an option
        came.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE.items():
            came.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(came.detach())


def hang_up(connection: Connection) -> None:
    """Shut down a connection, so that a thread that waits for its messages wakes up."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
