"""The pages of all runs of a folder: each is made when it is asked for, and again after its journal has changed."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from threading import Lock

from hydro_rasda.page.sections import Drawn
from hydro_rasda.page.write import Page
from hydro_rasda.results.reading import Stamp, Unreadable, or_why, read_record, runs_in, stamp
from hydro_rasda.results.records import RunRecord
from hydro_rasda.run.spec import SPEC

LOOK_SECONDS = 1.0
"""Between two looks at the journals."""

_SHARE = 5
"""So many times as long as a page took to be made, its next is not: no core is kept busy with it."""

PAGES = 32
"""Pages that are kept, the last ones."""


@dataclass
class _Made:
    """The page that was made last, and until when none takes its place."""

    stamps: tuple[Stamp, ...]
    page: Page | None = None
    html: str = ""
    until: float = -math.inf

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Have the page stay for a while, by the time that the block takes."""
        began = time.monotonic()
        yield
        now = time.monotonic()
        self.until = max(self.until, now) + _SHARE * (now - began)


class Runs:
    """The runs of a folder, read again, and made into a page again, where their journals have changed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._read: dict[str, tuple[Stamp, RunRecord | Unreadable]] = {}
        self._made: dict[tuple[str, ...], _Made] = {}
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)
        self._stamps: dict[str, Stamp] = {}
        self._looked = -math.inf

    def stamps(self) -> dict[str, Stamp]:
        """Of the journals of all runs, by name; looked for once in `LOOK_SECONDS`, however many readers ask."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            found = {}
            for path in runs_in(self.folder):
                with contextlib.suppress(OSError):  # removed meanwhile
                    found[path.name] = stamp(path)
            self._stamps, self._looked = found, time.monotonic()
        return self._stamps

    def _path(self, name: str) -> Path:
        return self.folder if self.folder.name == name and (self.folder / SPEC).is_file() else self.folder / name

    def listed(self) -> list[tuple[str, RunRecord | Unreadable, float]]:
        """All runs as `list_page` takes them, the last written first."""
        stamps = self.stamps()
        latest = sorted(stamps, key=lambda name: -stamps[name][1])
        return [(name, self._record(name, stamps[name]), stamps[name][1] / 1e9) for name in latest]

    def _record(self, name: str, stamp: Stamp) -> RunRecord | Unreadable:
        """A run; or why it cannot be read."""
        # Not the lock of its page: the list does not wait for figures.
        with self._locks[f"{name}/record"]:
            if name not in self._read or self._read[name][0] != stamp:
                self._read[name] = stamp, or_why(partial(read_record, self._path(name)))
            return self._read[name][1]

    def shown(self, *names: str) -> tuple[Stamp, ...]:
        """Of what `page` gives: where a page has just been made, for a while that of this page."""
        made = self._made.get(names)
        if made is not None and time.monotonic() < made.until:
            return made.stamps
        stamps = self.stamps()
        return tuple(stamps[name] for name in names)

    def page(self, *names: str) -> str:
        """The page of a run, or of several side by side, without figures; other pages do not wait while it is made."""
        return self._page(names).html

    def figure(self, figure: str, *names: str) -> str | None:
        """A figure of a page as JSON, drawn once; None if the page has no such figure. No other waits for it."""
        made = self._page(names)
        drawing = None if made.page is None else made.page.drawings.get(figure)
        if drawing is None:
            return None
        with made.working():
            found = or_why(drawing.drawn)
        return (Drawn("", note=f"not drawn: {found}") if isinstance(found, Unreadable) else found).served

    def _page(self, names: tuple[str, ...]) -> _Made:
        with self._locks["page/" + "/".join(names)]:
            stamps, made = self.shown(*names), self._made.get(names)
            if made is None or made.stamps != stamps:
                made = _Made(stamps)
                with made.working():
                    found = or_why(partial(self._make, names, stamps))
                    if isinstance(found, Unreadable):
                        made.html = f"not readable: {escape(found)}"
                    else:
                        made.page, made.html = found
                while len(self._made) >= PAGES:
                    self._made.pop(next(iter(self._made)), None)
                self._made[names] = made
            return made

    def _make(self, names: Sequence[str], stamps: Sequence[Stamp]) -> tuple[Page, str]:
        records = [self._record(name, stamp) for name, stamp in zip(names, stamps)]
        for record in records:
            if isinstance(record, Unreadable):
                raise ValueError(record)
        page = Page(*[record for record in records if not isinstance(record, Unreadable)])
        return page, page.html(live=True)
