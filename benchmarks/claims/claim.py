"""A line of the page of results, and what all its authors need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result_files import read


class Claim(NamedTuple):
    """A line of the page.

    Attributes:
        measured: What came out, with its unit.
        target: What was to be reached; "" where nothing was.
        met: Whether it was; None where there is no target.
    """

    what: str
    measured: str
    target: str
    met: bool | None
    where: str
    source: str


def waiting(what: str, target: str, source: str, where: str = "") -> Claim:
    """A line for what is ready to be measured, and has not been."""
    return Claim(what, "not run", target, None, where, source)


def machine_of(environment: dict[str, Any]) -> str:
    """The hardware and the day of a result file."""
    hardware = environment.get("machine") or f"{environment['cpu']}, {environment['cores']} cores"
    return f"{hardware}; {environment['date'][:10]}"


def of_source(source: str, where: str = "") -> Callable[..., Claim]:
    """A maker of the lines of one source: of what was measured, what came out, its target, and whether it was met."""

    def claim(what: str, measured: str, target: str = "", met: bool | None = None, where: str = where) -> Claim:
        return Claim(what, measured, target, met, where, source)

    return claim


def settled(*studies: str) -> Callable[[Path], list[Claim]]:
    """Return the maker of the lines of studies that are over; their pages name the commit at which a script stands."""

    def claims(folder: Path) -> list[Claim]:
        lines = read(folder / "settled.json", {})
        return [Claim(*line) for study in studies for line in lines.get(study, [])]

    return claims
