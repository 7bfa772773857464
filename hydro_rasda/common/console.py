"""A console for people: safe to print what others wrote, and with times in few characters."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

UNBROKEN = 10_000
"""Width of lines that nothing breaks."""

LINE_SECONDS = 60.0
"""Without a terminal, seconds between two lines of progress, at least."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Show a name or a value without the characters that a terminal would obey, such as escape sequences."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], str(text))


def one_line(text: object) -> str:
    """The same, in one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


class PrintableConsole(Console):
    """Prints what runs hold, which may be what others wrote, and has the terminal obey none of it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def make_console(quiet: bool = False, cls: type[Console] = PrintableConsole) -> Console:
    """For a terminal, as wide as it is; in a pipe or a log file, lines are not broken."""
    console = cls(quiet=quiet, highlight=False)
    if not console.is_terminal and not console.is_jupyter:
        console.width = UNBROKEN
    return console


def duration(seconds: float) -> str:
    """A time for people, in its two largest units: "12.3 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // (24 * 60)} d {minutes // 60 % 24} h"
