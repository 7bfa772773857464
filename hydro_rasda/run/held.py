"""Whether a process works on a run, seen from outside: nothing is locked or written for it."""

from __future__ import annotations

from pathlib import Path

LOCK = ".lock"
"""File in a run's folder that the process which works on it holds locked."""

_LOCKS = Path("/proc/locks")


def held(folder: Path) -> bool:
    """Whether a process of this machine that the kernel lets us see works on a run (Linux).

    False may also mean that it works on another machine, or in another container.
    """
    try:
        inode = (folder / LOCK).stat().st_ino
        locks = _LOCKS.read_text().splitlines()
    except OSError:
        return False
    # "1: FLOCK  ADVISORY  WRITE 25313 fe:00:2368030 0 EOF"; who waits for a lock has an arrow before the kind.
    return any(fields[1] == "FLOCK" and fields[5].endswith(f":{inode}") for line in locks if (fields := line.split()))
