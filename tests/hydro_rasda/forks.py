"""Work in a fork of the process that tests, which may be killed there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def forked(work: Callable[[], object]) -> int:
    """Begin work in a fork; return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def is_killed(work: Callable[[], object]) -> bool:
    """Do work in a fork; tell whether it was killed."""
    _, status = os.waitpid(forked(work), 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL
