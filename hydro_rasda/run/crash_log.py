"""A note in a file of the work that may end the process, so that the next process knows the cause of death.

If nothing can be forked (a GPU, data in an open file), the user's code runs in the tuner's own process. A segmentation
fault there ends the tuner, and would end it again whenever the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydro_rasda.run.files import open_regular, read_json, remove

DEATHS = 2
"""Number of deaths in a row at a piece of work after which the work is taken to be the cause."""


class CrashLog:
    """The piece of work that is under way, its progress, and the work at which earlier processes died.

    A kill from outside comes at any place; a fault of the work itself comes at the same place. Deaths therefore count
    only if they follow each other at the same place of the same work. Without a `file`, nothing is noted.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._handle, self._length = file, -1, 0
        self._now: tuple[str, int] | None = None
        self._deaths: dict[str, tuple[int, int]] = {}
        if file is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):  # it is only a hint
            found = read_json(file)
            self._deaths = {str(what): (int(at), int(count)) for what, (at, count) in found["deaths"].items()}
            if found["now"] is not None:
                what, at = str(found["now"][0]), int(found["now"][1])
                before, count = self._deaths.get(what, (at, 0))
                self._deaths[what] = at, count + 1 if before == at else 1

    def blamed(self, what: str) -> str:
        """Say how a piece of work has ended processes, if it is to be left alone; else return an empty text."""
        at, count = self._deaths.get(what, (0, 0))
        if count < DEATHS:
            return ""
        return f"it was the tuner's own, and ended {count} times in a row after epoch {at}"

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Note a piece of work as under way within the context; an exception is no death."""
        self._note((what, 0))
        try:
            yield
            self._deaths.pop(what, None)
        finally:
            self._note(None)

    def reached(self, epoch: int) -> None:
        """Note that the work under way has reached an epoch."""
        if self._now is not None:
            what, _ = self._now
            if epoch > self._deaths.get(what, (epoch, 0))[0]:
                del self._deaths[what]
            self._note((what, epoch))

    def _note(self, now: tuple[str, int] | None) -> None:
        self._now = now
        if self._file is None:
            return
        if self._handle < 0:
            self._handle = open_regular(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        told: dict[str, Any] = {"now": now, "deaths": self._deaths}
        content = json.dumps(told).encode()
        # In one write, which a death cannot cut. Not synced: the note need only outlive the process.
        os.pwrite(self._handle, content.ljust(self._length), 0)
        self._length = max(self._length, len(content))

    def close(self) -> None:
        """Remove the file, unless it notes deaths of processes."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle, self._length = -1, 0
        if self._file is not None and not self._deaths:
            with contextlib.suppress(OSError):
                remove(self._file)
