"""A watch over Ray's head: without it, Ray ends this process after a minute, from C++, with nothing to catch."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator

_EVERY_S = 2.0
_ANSWER_S = 5.0
_MISSES = 3


@contextlib.contextmanager
def head_watched(address: str) -> Iterator[None]:
    """Within it, a line on stderr tells where the head does not answer any more, and what to do.

    Args:
        address: Of the head, "host:port".
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(address, over), name="head watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(address: str, over: threading.Event) -> None:
    misses = 0
    while misses < _MISSES:
        if over.wait(_EVERY_S):
            return
        misses = 0 if _answers(address) else misses + 1
    print(
        f"Ray's head at {address} does not answer any more. Unless it comes back, Ray ends this process within "
        "minutes. What was trained is kept: once a cluster runs again, the same call goes on with the run.",
        file=sys.stderr,
        flush=True,
    )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True
