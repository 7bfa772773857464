"""Temporary folders for checkpoints on their way and for ranks that meet, each named for the process that removes it.

A process that is killed removes nothing: the next process that uses such folders on the machine does so in its place.
On Ray it is pickled by value, see `hydro_rasda.backends.ray.rank_actors`.
"""

from __future__ import annotations

import os
import shutil
import tempfile

_PREFIX = "hydro_rasda-of-"


def owner(pid: int) -> str:
    """A process by where it runs, its number and when it started: numbers are given again."""
    return f"{_place()}-{pid}-{_started(pid)}"


def lives(process: str) -> bool:
    """Return whether a process lives that `owner` named: a zombie does not, and a later one of its number is not it."""
    return owner(int(process.split("-")[1])) == process


def make_folder(owned_by: str) -> str:
    """A new folder, of this user's alone, which the process `owned_by` removes (see `owner`)."""
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{owned_by}-")


def remove_left() -> None:
    """Remove this user's folders whose processes lived here and live no more."""
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
    """Name the scope of process numbers: a start of a machine, in a container; others may share its folder."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read()[:8]}{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "here"


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; "" where there is none, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
