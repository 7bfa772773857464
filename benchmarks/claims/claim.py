"""A line of the page of results, and what all its authors need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Claim(NamedTuple):
    """A line of the page.

    Attributes:
        what: Was measured.
        measured: What came out, with its unit.
        target: What was to be reached; "" where nothing was.
        met: Whether it was; None where there is no target.
        where: Hardware, date and load.
        source: The result file, below the results folder.
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


def read_file(path: Path) -> Any:
    """What a result file holds; None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None
