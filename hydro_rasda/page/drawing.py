"""A part of a page, and its figures: each is drawn when it is first asked for."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from hydro_rasda.plots.look import HEIGHT, is_empty

T = TypeVar("T")


class Once(Generic[T]):
    """Calls a function when its result is first asked for; others who ask at the same time wait for it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock, self._made = make, Lock(), list[T]()

    def __call__(self) -> T:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


@dataclass(frozen=True)
class Drawn:
    """A figure as a page holds it.

    Attributes:
        json: Data for the page's scripts, safe within a script; "" if there is nothing to show.
        height: Pixels.
        note: Why there is nothing to show; then nothing is drawn.
    """

    json: str
    height: int = HEIGHT
    note: str = ""

    @property
    def served(self) -> str:
        """The JSON that a server answers: the data, or the note."""
        return self.json or safe({"note": self.note})


class Drawing(NamedTuple):
    """A figure of a page by the name of its element, or the table of trials."""

    name: str
    drawn: Callable[[], Drawn]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        facts: Names, and what is to be said of them.
        table: The heads of columns, then rows.
        trials: The table of trials, which a reader sorts and filters.
        failures: A line, a configuration and a traceback each.
    """

    title: str
    sentences: list[str] = field(default_factory=list)
    facts: Mapping[str, str] = field(default_factory=dict)
    table: Sequence[Sequence[str]] = ()
    figures: list[Drawing] = field(default_factory=list)
    trials: Drawing | None = None
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    code: str = ""
    grid: bool = False

    @property
    def drawings(self) -> list[Drawing]:
        """All that a page's scripts draw."""
        return [*self.figures, *([self.trials] if self.trials else [])]


def drawing(make: Callable[..., Any], *arguments: Any, name: str = "") -> Drawing:
    """A figure of Plotly's that is drawn by `make(*arguments)`, once."""
    return Drawing(name or make.__name__.replace("_", "-"), Once(lambda: _held(make(*arguments))))


def _held(figure: Any) -> Drawn:
    if is_empty(figure):
        return Drawn("", note=html.unescape(figure.layout.annotations[0].text))
    written = json.loads(figure.to_json())
    written["layout"].pop("template", None)  # the page has its own, light and dark
    return Drawn(safe(written), figure.layout.height)


def safe(value: Any) -> str:
    """A value as JSON within a script: nothing in it may end the script, or begin a comment."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
