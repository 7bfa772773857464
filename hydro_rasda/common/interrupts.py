"""Delay Ctrl-C while a child process starts, so that the code that ends it knows of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Delay Ctrl-C until the end of the context. Also, Python ignores errors in functions that it calls at a fork."""
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
