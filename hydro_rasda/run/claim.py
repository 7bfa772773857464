"""A run's folder, locked by this process before everything about the run is known.

The lock comes first, because only its holder may write to the folder. Then the call is checked, before any dry run. A
call that is refused leaves the folder as it was.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from hydro_rasda.history.lines import jsonable
from hydro_rasda.run import files
from hydro_rasda.run.crash_log import DOING, CrashLog
from hydro_rasda.run.journal import JOURNAL, MESSAGES
from hydro_rasda.run.resume_rules import RESULTS, RunExists, refuse_other
from hydro_rasda.run.run_json import SPEC, read_spec

LOCK = ".lock"
"""File in a run's folder. The process that works on the run locks it."""

_LOCKS = Path("/proc/locks")

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of a file system without locks, such as NFS without its lock daemon."""


class Claim:
    """Lock a run's folder for this process until `release`; create the folder if it does not exist.

    Args:
        resume: As in `Store.open`.
        exclusive: True requires that this call creates the folder.

    Attributes:
        found: The content of an existing `run.json`; None if there is none.
        doing: Notes on the work that this process does itself, and on the work at which earlier processes died.
        counts: True once the folder holds results that a later call can use. Then it stays, however this call ends.

    Raises:
        RunExists: if there is a run and `resume` is "never", or the folder holds something else.
        FileNotFoundError: if there is no run and `resume` is "must".
        RuntimeError: if another process holds the folder.
        Unsafe: if a file of the run is a link, or not a regular file.
        OSError: if the folder cannot be written or locked. FileExistsError if it exists, but `exclusive` is True.
    """

    def __init__(self, path: Path, resume: str, exclusive: bool = False) -> None:
        self.path, self.resume = path, resume
        spec = path / SPEC
        if not spec.exists():
            refuse_new(path, resume)
        files.refuse_links(path / "checkpoints", *(path / name for name in (LOCK, JOURNAL, DOING, MESSAGES)), spec)
        self._made = [made for made in (path / LOCK, path, *path.parents) if not made.exists()]
        try:
            with files.naming(path, files.WRITABLE):
                files.make_private(path, exist_ok=not exclusive)
            self._lock = hold(path)
        except FileExistsError:  # another call has just created the folder, so this call has nothing to remove
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError):  # another process holds the lock, so its lock file stays
                self._made = [made for made in self._made if made.name != LOCK]
            self._undo()
            raise
        # Look for files only now that this process holds the lock. Before, another process may have been writing.
        self.counts = spec.exists()
        self._made[:0] = [made for name in (SPEC, *RESULTS) if not (made := path / name).exists()]
        try:
            self.found = read_spec(path) if self.counts else None
            if self.found is not None and resume == "never":
                raise RunExists(f"`resume` is 'never', but {path} holds a run; choose another `name`")
            self.doing = CrashLog(path / DOING, anew=resume == "changed")
            with files.naming(path, files.WRITABLE):
                files.make_inner(path / "checkpoints")
        except BaseException:
            if not self.counts:
                self._undo()
            self._lock.release()
            raise

    def refuse_other(self, known: Mapping[str, Any]) -> None:
        """Raise RunExists if the folder holds another run; `known` is what `Identity.known` returned for this call."""
        if self.found is not None:
            refuse_other(self.path, self.found, jsonable(known), self.resume)

    def release(self, undo: bool = False) -> None:
        """Unlock the folder. If `undo` is True, first remove what this call created, unless `counts` is True."""
        self.doing.close()
        if undo and not self.counts:
            self._undo()
        self._lock.release()

    def _undo(self) -> None:
        """Remove what this call created: files, checkpoints, and folders if they are empty."""
        for made in self._made:
            with contextlib.suppress(OSError):
                if not made.is_dir():
                    made.unlink()
                elif made.parent == self.path:
                    shutil.rmtree(made)
                else:
                    made.rmdir()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # A user who interrupts a run may want to resume it, so it stays once there is a `run.json`.
        self.release(undo=isinstance(error, Exception) or not (self.path / SPEC).exists())


def refuse_new(path: Path, resume: str) -> None:
    """Check that a new run may begin in the folder `path`, which holds no `run.json`.

    Raise FileNotFoundError if `resume` is "must", or RunExists if the folder holds something else.
    """
    if resume == "must":
        raise FileNotFoundError(f"`resume` is 'must', but there is no run to go on with in {path}")
    if not path.exists():
        return
    if not path.is_dir():
        raise RunExists(f"{path} is a file, where the run's folder would be; choose another `name` or `storage_path`")
    # A process that was killed before its run began leaves at most these files.
    left = (LOCK, DOING, "checkpoints")
    strange = [p.name for p in path.iterdir() if p.name not in left and not p.match(files.TEMPORARY)]
    if strange or any((path / "checkpoints").glob("*")):
        raise RunExists(f"{path} is there, but holds no run; choose another `name` or `storage_path`")


def hold(folder: Path) -> FileLock:
    """Lock a run for this process; call `release` of the returned lock to unlock it.

    Raises:
        RuntimeError: if another process holds the lock.
        Unsafe: if a link or a folder is in the place of the lock file.
        OSError: if the file system has no locks, or the folder cannot be written.
    """
    files.refuse_links(folder / LOCK)
    files.refuse_irregular(folder / LOCK)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise RuntimeError(f"another process is working on the run in {folder}, or another call of this one") from None
    except OSError as error:
        way = "choose a `storage_path` on a local disk, or mount this file system with locks (NFS: local_lock=flock)"
        locked = f"a run is locked, so that two processes do not write to it; {way}"
        told = f"{error.strerror}: {locked if error.errno in _NO_LOCKS else files.WRITABLE}"
        raise OSError(error.errno, told, lock.lock_file) from error
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
    except (OSError, StopIteration, files.Unsafe):
        return False
    # A lock that is held: "1: FLOCK  ADVISORY  WRITE 25313 fe:00:2368030 0 EOF". If a process only waits for the lock,
    # its line has an arrow before FLOCK, and does not count.
    return any(fields[1] == "FLOCK" and fields[5] == name for line in locks if (fields := line.split()))


def _name(file: Path) -> str:
    """Return a file's device and inode as in the kernel's list of locks, such as "fe:00:2368030".

    The device is taken from the file's mount, because `stat` hides it on some file systems.
    """
    with files.open_to_read(file) as opened:
        told = Path(f"/proc/self/fdinfo/{opened.fileno()}").read_text().split()
        mount, inode = told[told.index("mnt_id:") + 1], os.fstat(opened.fileno()).st_ino
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    device = next(fields[2] for line in lines if (fields := line.split())[0] == mount)
    major, minor = map(int, device.split(":"))
    return f"{major:02x}:{minor:02x}:{inode}"
