"""Notes that tell the next process of a run why the last one died.

If the library cannot fork (for example with a GPU, or data in an open file), the user's code runs in the tuner's own
process. A segmentation fault there ends the tuner, and would end it again at each resume. So a file notes the work in
progress. The file cannot distinguish a fault from a kill by the system, such as a preemption. So work at which
processes died is done last, and it is dropped only if another process then dies of it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydro_rasda.run.files import open_regular, read_json, remove

DOING = ".doing"
"""File in a run's folder that notes the work in progress, and the work at which earlier processes died."""

DEATHS = 2
"""Deaths in a row at a piece of work after which the work is suspected. Suspected work is done last, or in parts."""

DROPPED = "the tuner's own process died"
"""Beginning of the error message of dropped work: a process died of it again when nothing else was left to do."""

TRY_AGAIN = "the same call with `resume='changed'` tries it again"


def training_of(members: Sequence[int], stop: int) -> str:
    """Return the name under which the training of a sweep's group to a milestone is noted."""
    return f"training {[*members]} to epoch {stop}"


class CrashLog:
    """Note in a file which work is in progress, how far it is, and at which work earlier processes died.

    A kill from outside comes at any epoch; a fault of the work comes at the same epoch again. So deaths count only if
    they happen in a row at the same epoch of the same work. Without a `file`, nothing is noted.

    Args:
        anew: True sets earlier deaths aside. They do not count, but stay in the file until `forget_aside`.
    """

    def __init__(self, file: Path | None = None, anew: bool = False) -> None:
        self._file, self._handle, self._length = file, -1, 0
        self._now: tuple[str, int] | None = None
        self._deaths: dict[str, tuple[int, int]] = {}
        self._aside: dict[str, tuple[int, int]] = {}
        if file is None:
            return
        # The file is only a hint. If it cannot be read, begin without it.
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            found = read_json(file)
            self._deaths = {str(what): (int(at), int(count)) for what, (at, count) in found["deaths"].items()}
            if found["now"] is not None:
                what, at = str(found["now"][0]), int(found["now"][1])
                before, count = self._deaths.get(what, (at, 0))
                self._deaths[what] = at, count + 1 if before == at else 1
        if anew:
            self._aside, self._deaths = self._deaths, {}

    def suspected(self, what: str) -> int:
        """Return how many processes in a row died at a piece of work, if enough died to suspect it; otherwise 0."""
        _, count = self._deaths.get(what, (0, 0))
        return count if count >= DEATHS else 0

    @property
    def suspects(self) -> bool:
        """Tell whether any work is suspected."""
        return any(count >= DEATHS for _, count in self._deaths.values())

    def dropped(self, what: str) -> str:
        """Return the error message of work that is dropped, because processes died at it; "" if it may be done."""
        at, count = self._deaths.get(what, (0, 0))
        return f"{DROPPED} of it {count} times in a row after epoch {at}; {TRY_AGAIN}" if count > DEATHS else ""

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Note a piece of work as in progress within the context.

        Leaving the context, even by an exception, clears the note and the earlier deaths at this work.
        """
        self._note((what, 0))
        try:
            yield
        finally:
            self._deaths.pop(what, None)
            self._note(None)

    def reached(self, epoch: int) -> None:
        """Note that the work in progress has reached an epoch."""
        if self._now is not None:
            what, _ = self._now
            if epoch > self._deaths.get(what, (epoch, 0))[0]:
                del self._deaths[what]
            self._note((what, epoch))

    def forget(self, what: str) -> None:
        """Forget the deaths at a piece of work that has been done in parts since then."""
        self._deaths.pop(what, None)
        self._note(self._now)

    def forget_aside(self) -> None:
        """Forget permanently the deaths that were set aside."""
        if self._aside:
            self._aside = {}
            self._note(self._now)

    def _note(self, now: tuple[str, int] | None) -> None:
        self._now = now
        if self._file is None:
            return
        told: dict[str, Any] = {"now": now, "deaths": {**self._aside, **self._deaths}}
        content = json.dumps(told).encode()
        # A full disk must not fail the training: the file is only a hint.
        with contextlib.suppress(OSError):
            if self._handle < 0:
                self._handle = open_regular(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            # Write once, so that a death cannot leave half a note. Do not sync, because the note must survive the end
            # of the process, not of the machine.
            os.pwrite(self._handle, content.ljust(self._length), 0)
            self._length = max(self._length, len(content))

    def close(self) -> None:
        """Close the file, and remove it unless it notes deaths of processes."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle, self._length = -1, 0
        if self._file is not None and not self._deaths and not self._aside:
            with contextlib.suppress(OSError):
                remove(self._file)
