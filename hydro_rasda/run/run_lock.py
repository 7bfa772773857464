"""The lock that keeps a second process from working on a run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from filelock import FileLock, Timeout

from hydro_rasda.run.files import WRITABLE, Unsafe, open_to_read, refuse_irregular, refuse_links

LOCK = ".lock"
"""File in a run's folder. The process that works on the run locks it."""

_LOCKS = Path("/proc/locks")

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of a file system without locks, such as NFS without its lock daemon."""


def hold(folder: Path) -> FileLock:
    """Lock a run for this process; call `release` of the returned lock to unlock it.

    Raises:
        RuntimeError: if another process holds the lock.
        Unsafe: if a link or a folder is in the place of the lock file.
        OSError: if the file system has no locks, or the folder cannot be written.
    """
    refuse_links(folder / LOCK)
    refuse_irregular(folder / LOCK)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise RuntimeError(f"another process is working on the run in {folder}") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise OSError(error.errno, f"{error.strerror}: {WRITABLE}", lock.lock_file) from error
        way = "choose a `storage_path` on a local disk, or mount this file system with locks (NFS: local_lock=flock)"
        raise OSError(
            error.errno,
            f"{error.strerror}: a run is locked, so that two processes do not write to it; {way}",
            lock.lock_file,
        ) from error
    return lock


def shows_locks() -> bool:
    """Tell whether processes can see each other's locks on this system (Linux). Elsewhere, `held` is always False."""
    return _LOCKS.exists()


def held(folder: Path) -> bool:
    """Tell whether a visible process of this machine works on a run (Linux), without locking anything.

    False may also mean that the process works on another machine, or in another container.
    """
    try:
        name = _name(folder / LOCK)
        locks = _LOCKS.read_text().splitlines()
    except (OSError, StopIteration, Unsafe):
        return False
    # "1: FLOCK  ADVISORY  WRITE 25313 fe:00:2368030 0 EOF"; a line of a waiting process has an arrow before FLOCK.
    return any(fields[1] == "FLOCK" and fields[5] == name for line in locks if (fields := line.split()))


def _name(file: Path) -> str:
    """Return a file's device and inode as in the kernel's list of locks, such as "fe:00:2368030".

    The device is taken from the file's mount, because `stat` hides it on some file systems.
    """
    with open_to_read(file) as opened:
        told = Path(f"/proc/self/fdinfo/{opened.fileno()}").read_text().split()
        mount, inode = told[told.index("mnt_id:") + 1], os.fstat(opened.fileno()).st_ino
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    device = next(fields[2] for line in lines if (fields := line.split())[0] == mount)
    major, minor = map(int, device.split(":"))
    return f"{major:02x}:{minor:02x}:{inode}"
