"""Make a process end together with the process that started it. Needs no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends. On systems other than Linux, do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def depend_on(parent: int) -> None:
    """Make this process end with its parent and ignore Ctrl-C, which the parent handles.

    If memory runs out, the kernel ends this process before others.
    """
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # The parent's progress bar wraps the standard streams. This process shows no bar, and writes to the plain streams.
    sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
