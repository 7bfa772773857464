"""Temporary folders for checkpoints in transfer and for meeting points of ranks, named after their owning process.

A killed process does not remove its folders. The next process that uses such folders on the machine removes them. On
Ray this module is pickled by value, see `hydro_rasda.backends.ray.rank_actors`.
"""

from __future__ import annotations

import os
import shutil
import tempfile

_PREFIX = "hydro_rasda-of-"


def owner(pid: int) -> str:
    """Return a unique name of a process: its place (see `_place`), its number, and its start time.

    The start time is needed because numbers are reused.
    """
    return f"{_place()}-{pid}-{_started(pid)}"


def lives(process: str) -> bool:
    """Return whether the process that `owner` named is alive. A zombie, or a later process of its number, is not."""
    return owner(int(process.split("-")[1])) == process


def make_folder(owned_by: str) -> str:
    """Make a folder that only this user can access. The process `owned_by` (see `owner`) must remove it."""
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{owned_by}-")


def remove_left() -> None:
    """Remove this user's folders whose owners ran on this machine and have ended."""
    root = tempfile.gettempdir()
    for name in os.listdir(root):
        parts = name.removeprefix(_PREFIX).split("-")
        if not name.startswith(_PREFIX) or len(parts) != 4 or parts[0] != _place() or not parts[1].isdecimal():
            continue
        if not lives("-".join(parts[:3])) and _is_mine(path := os.path.join(root, name)):
            shutil.rmtree(path, ignore_errors=True)


def _is_mine(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.getuid()
    except OSError:
        return False


def _place() -> str:
    """Return a name for the scope in which process numbers are unique: this boot of the machine, and this container.

    Other containers and machines may share the folder of temporary files.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read()[:8]}{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "here"


def _started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; "" if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
