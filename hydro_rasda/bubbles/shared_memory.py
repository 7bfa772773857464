"""Messages of a host and its guest without a system call: a page of memory that both have. Needs no torch."""

from __future__ import annotations

import mmap
import os

_TIED, _WORKING, _LEAVING, _UNTIL = range(4)


class Page:
    """Four numbers that each side reads as the other one wrote them last; `handle` opens the memory elsewhere."""

    def __init__(self, handle: int | None = None) -> None:
        self.handle = os.memfd_create("bubbles") if handle is None else handle
        if handle is None:
            os.ftruncate(self.handle, mmap.PAGESIZE)
        self._numbers = memoryview(mmap.mmap(self.handle, mmap.PAGESIZE)).cast("q")

    def _get(self, at: int) -> int:
        return self._numbers[at]

    @property
    def tied(self) -> bool:
        """Return whether the guest ends with its host: one that does not yet must not be stopped for ever."""
        return self._get(_TIED) != 0

    @tied.setter
    def tied(self, holds: bool) -> None:
        self._numbers[_TIED] = holds

    @property
    def working(self) -> bool:
        """Return whether the guest has something to train."""
        return self._get(_WORKING) != 0

    @working.setter
    def working(self, holds: bool) -> None:
        self._numbers[_WORKING] = holds

    @property
    def leaving(self) -> bool:
        """Return whether the guest is to end after the epoch that is under way."""
        return self._get(_LEAVING) != 0

    @leaving.setter
    def leaving(self, holds: bool) -> None:
        self._numbers[_LEAVING] = holds

    @property
    def until(self) -> float:
        """When the open bubble is expected to end, by the system's monotonic clock; 0 where none is open."""
        return self._get(_UNTIL) / 1e9

    @until.setter
    def until(self, seconds: float) -> None:
        self._numbers[_UNTIL] = round(seconds * 1e9)

    def close(self) -> None:
        self._numbers.release()
        os.close(self.handle)
