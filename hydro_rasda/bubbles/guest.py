"""The guest's side: the process that connects to a sweep, and trains what the sweep sends.

Torch is imported only once there is a sweep.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

from hydro_rasda.bubbles.guest_handle import SharedPage
from hydro_rasda.bubbles.rendezvous import connect
from hydro_rasda.processes.die_with_parent import depend_on

LOOK_S = 0.2
"""Seconds between two checks of an idle guest: for work, and for a request to leave."""


def begin(handle: int, host: int, source: str, device: str, preempt: bool, name: str, before: tuple[str, int]) -> None:
    """Train as a guest until the host asks it to leave, or until the sweep is over.

    `handle` is that of the `SharedPage`, `host` is the pid of the host, and `source` is the folder of the sweep. With
    `preempt`, the host stops this process at the end of a bubble. Otherwise, this process waits by itself. `before` has
    the name and the exit status of the guest that the host had before.
    """
    depend_on(host)
    page = SharedPage.open(handle)
    page.tied = True
    while not page.leaving:
        with contextlib.suppress(OSError, ValueError, KeyError):
            connection = connect(Path(source))
            connection.send_bytes(json.dumps({"name": name, "before": before}).encode())
            break
        time.sleep(LOOK_S)
    else:
        return
    Thread(target=_end_with, args=[connection], daemon=True).start()
    from hydro_rasda.bubbles.guest_training import train

    with contextlib.suppress(OSError):  # raised if the sweep has ended
        train(connection, page, device, preempt, partial(_more, connection, page))


def _more(connection: Connection, page: SharedPage) -> bool:
    """Wait until the sweep sends a message, and return True; return False if the host asks the guest to leave."""
    page.working = False
    while not page.leaving:
        if connection.poll(LOOK_S):
            page.working = True
            return True
    return False


def _end_with(connection: Connection) -> None:
    """Wait until the sweep hangs up, then end this process, because nobody needs its training any more."""
    hung_up = select.poll()
    hung_up.register(connection.fileno(), select.POLLRDHUP)
    hung_up.poll()
    os._exit(0)
