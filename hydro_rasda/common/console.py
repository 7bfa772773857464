"""A console that prints untrusted text safely, and short texts for times."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

UNBROKEN = 10_000
"""Console width at which no line is wrapped."""

LINE_SECONDS = 60.0
"""Least number of seconds between two lines of progress, if the output is not a terminal."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""Return a name or a value as text in which control characters, such as those of escape sequences, are visible.

    >>> print(printable("\x1b[1mbold"))
    \x1b[1mbold
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], str(text))


def one_line(text: object) -> str:
    r"""Return the text of `printable` in one line.

    >>> print(one_line("\x1b[1mtwo\nlines\t"))
    \x1b[1mtwo\nlines\t
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def encodable(text: str, file: IO[str]) -> str:
    """Return a text with escapes in place of the characters that a file's encoding lacks."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class PrintableConsole(Console):
    """A console that makes control characters visible, because a run may contain text that others wrote."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else encodable(printable(segment.text), self.file)
            yield segment._replace(text=text)


def make_console(quiet: bool = False, cls: type[Console] = PrintableConsole) -> Console:
    """Make a console with the width of the terminal; in a pipe or a log file, lines are not wrapped."""
    console = cls(quiet=quiet, highlight=False)
    if not console.is_terminal and not console.is_jupyter:
        console.width = UNBROKEN
    return console


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: "12.3 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // (24 * 60)} d {minutes // 60 % 24} h"
