"""Reopen the open files of a forked process, so that no two processes share a file position.

A fork copies file descriptors, but all processes share one position in each open file. If a data set keeps a file open,
a process that seeks moves the position for all others. They then read wrong rows without an error.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_OPENED = Path("/proc/self/fd")  # only Linux has it, and the library forks only on Linux
_KERNELS = ("/proc/", "/sys/")
"""Folders of the kernel's files, which hold no data. Such a file may vanish while it is open, when its process ends."""

_STANDARD = 3
"""Lower descriptors are standard input, output and error. They are left alone, because no data set reads from them."""


def open_files_again() -> None:
    """Reopen each file that this forked process inherited, under the same descriptor, so that it has its own position.

    It does not matter what holds the descriptor: an attribute, a global, or a library in C. Files that are open only to
    write or append stay shared, because each process adds to what the others wrote. Files with a write lock stay
    shared, too, because a file that is opened again would be without the lock.

    Files that are open to both read and write ("r+", "w+") get their own positions, too. Such a file may be a data set
    or a log, and wrong rows are worse than lost lines. If several processes write to such a log, their lines overwrite
    each other. Open a log with "a".

    Raises:
        OSError: If a file cannot be opened again; the message says what to do.
    """
    numbers = [int(name) for name in os.listdir(_OPENED)] if _OPENED.exists() else []
    for number in [number for number in numbers if number >= _STANDARD]:
        try:
            kind, info = os.fstat(number).st_mode, Path(f"/proc/self/fdinfo/{number}").read_text()
        except OSError:  # `listdir` above had this descriptor open; it is closed by now
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
    """A `worker_init_fn` of a DataLoader, with which each worker process has its own file positions.

    Attributes:
        then: The loader's previous `worker_init_fn`, which is called afterwards.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker: int) -> None:
        open_files_again()
        if self.then is not None:
            self.then(worker)
