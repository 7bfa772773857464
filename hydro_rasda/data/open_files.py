"""Open files of a forked process: each is opened again, so that no two processes read at one shared position.

A fork copies the numbers of open files, but not their positions in the files. If a data set keeps a file open after its
first read, a process that seeks moves the position of all others, and they read wrong rows without an error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_OPENED = Path("/proc/self/fd")  # of Linux, the only system on which the library forks
_KERNELS = ("/proc/", "/sys/")
"""Folders of the kernel's own files. They hold no data, and one may be gone while it is open, as its process is."""

_STANDARD = 3
"""Standard input, output and error come first. No data set reads from them."""


def open_files_again() -> None:
    """Give each file that this forked process inherited a position of its own, at the same number.

    It does not matter what holds the number: an attribute, a global, or a library in C. Files that are only written, or
    written at their end, stay shared, because each process adds to what the others wrote. So do files that are locked
    to be written, since the lock belongs to the file as it was opened.

    Files that are open to be both read and written ("r+", "w+") get their own positions, too. Nothing tells a data set
    from a log among them, and wrong rows are worse than lost lines. If several processes write to such a log, their
    lines overwrite each other. Open a log with "a".

    Raises:
        OSError: if a file cannot be opened again; it says what to do.
    """
    numbers = [int(name) for name in os.listdir(_OPENED)] if _OPENED.exists() else []
    for number in [number for number in numbers if number >= _STANDARD]:
        try:
            kind, info = os.fstat(number).st_mode, Path(f"/proc/self/fdinfo/{number}").read_text()
        except OSError:  # the list of numbers, which was open while it was read
            continue
        flags = int(info.partition("flags:")[2].split()[0], 8)
        written = flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_APPEND | os.O_PATH)
        locked = any(line.startswith("lock:") and " WRITE " in line for line in info.splitlines())
        of_the_kernel = os.readlink(_OPENED / str(number)).startswith(_KERNELS)
        if stat.S_ISREG(kind) and not (written or locked or of_the_kernel):
            _open_again(number, flags)


def _open_again(number: int, flags: int) -> None:
    place = _OPENED / str(number)
    try:
        again = os.open(place, flags & (os.O_ACCMODE | os.O_DIRECT))
    except OSError as error:
        told = f"{error.strerror}: a forked process must open a file again that the process before it has open"
        way = "close it, or set HYDRO_RASDA_ONE_PROCESS=1 in the environment to train in one process"
        raise OSError(error.errno, f"{told}; {way}", os.readlink(place)) from error
    os.lseek(again, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(again, number, os.get_inheritable(number))
    os.close(again)


@dataclass(frozen=True)
class OwnFiles:
    """The `worker_init_fn` of a DataLoader whose processes read files at positions of their own.

    Attributes:
        then: The `worker_init_fn` that the loader had.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker: int) -> None:
        open_files_again()
        if self.then is not None:
            self.then(worker)
