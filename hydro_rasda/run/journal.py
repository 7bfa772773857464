"""A run's journal: one line for each metric, event and finished unit of work.

The lines of a unit are written at once, the unit's own last. What follows the last such line was never finished, and
does not count. A line in between that is none was changed by something else than a run: which units it told of, and
which of those after it build on them, cannot be known, so that nothing is guessed.

A line that was written twice counts once. A copy of a run's folder can double lines, each of them or a whole part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydro_rasda.checks import in_order, require
from hydro_rasda.run.files import open_to_read, parse_json

JOURNAL = "journal.jsonl"

JournalLine = dict[str, Any]
"""One line of the journal: plain values, of which "event" says what it tells of."""

UNIT = "unit"

_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    UNIT: {"key": str, "value": object, "seconds": (int, float), "at": (int, float), "swept": (int, float)},
    "metrics": {"stage": str, "trial": int, "epoch": int},
    "trial": {"trial": int, "config": dict},
    "failed": {"trial": int, "error": str},
}
"""What lines of an event have, at the least."""

LONGEST = 2**26
"""Bytes of a line: a longer one was not written by a run."""

MOST = 2**30
"""Bytes of a journal: a larger one is not read."""

_LARGEST = 1e15
"""Numbers beyond it are neither times nor counts."""


@dataclass(frozen=True)
class Unit:
    """A finished unit of work, as the journal keeps it.

    Attributes:
        value: JSON values: what later units and decisions need to know.
        lines: The unit's metrics and events, one journal line each.
        seconds: Wall time that it took; units that ran beside each other count in full.
        at: Wall time of the run when it was finished.
        swept: Of that, what the sweep had taken.
    """

    value: Any
    lines: list[JournalLine] = field(default_factory=list)
    seconds: float = 0.0
    at: float = 0.0
    swept: float = 0.0


class DamagedJournal(ValueError):
    """A line of a journal cannot be read, and finished units of work follow it; says which line, and how to go on."""


@dataclass(frozen=True)
class Record:
    """What a journal tells.

    Attributes:
        units: The finished ones by key, in the order in which they finished.
        end: Length in bytes up to the last of them.
        damage: Which whole line after that cannot be read, in words; empty where all can.
    """

    units: dict[str, Unit]
    end: int = 0
    damage: str = ""


def read_units(path: Path) -> Record:
    """Read a journal, which may be being written.

    Raises:
        DamagedJournal: where there are finished units after a line that cannot be read, or a line has no end.
        Unsafe: where it is no regular file.
    """
    units: dict[str, Unit] = {}
    try:
        file = open_to_read(path)
    except FileNotFoundError:
        return Record(units)
    lines: dict[bytes, JournalLine] = {}
    finished: set[bytes] = set()  # no unit is recorded twice at one time of its run
    end = kept = number = bad = 0
    damage = ""
    with file:
        require(file.seek(0, 2) <= MOST, "path", str(path), f"a journal of at most {MOST} bytes")
        file.seek(0)
        for number, raw in enumerate(iter(partial(file.readline, LONGEST + 1), b""), 1):
            if len(raw) > LONGEST:
                raise DamagedJournal(f"line {number} of {path} has more than {LONGEST} bytes: no run wrote it")
            end += len(raw)
            if not raw.endswith(b"\n"):
                break
            try:
                line = _parsed(raw)
            except ValueError as error:
                bad, damage = bad or number, damage or f"line {number} of {path} cannot be read ({error})"
                continue
            if line["event"] != UNIT:
                lines.pop(raw, None)
                lines[raw] = line
                continue
            if damage:
                raise DamagedJournal(
                    f"{damage}, and finished units of work follow it: mend the line, or leave it and all after it out "
                    f"(`head -n {bad - 1}` of the file in its place), and what these told is done again"
                )
            if raw not in finished:
                finished.add(raw)
                units.pop(line["key"], None)
                told = [*lines.values()]
                units[line["key"]] = Unit(line["value"], told, line["seconds"], line["at"], line["swept"])
            lines, kept = {}, end
    return Record(units, kept, damage)


def _parsed(raw: bytes) -> JournalLine:
    line = parse_json(raw)
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        raise ValueError("no object with an 'event'")
    for name, kind in _FIELDS.get(line["event"], {}).items():
        found: Any = line.get(name, ...)
        if found is ... or not isinstance(found, kind):
            raise ValueError(f"{line['event']!r} without a proper {name!r}")
        if kind is not object and isinstance(found, (int, float)) and abs(found) > _LARGEST:
            raise ValueError(f"{line['event']!r} without a proper {name!r}")
    return line


def jsonable(value: Any) -> Any:
    """A value as strict JSON gives it back: NaN and infinities become null, what has no JSON form its `repr`."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return name_of(value)


def name_of(value: Any) -> str:
    """What the journal has in place of a value without a JSON form, in every process."""
    if isinstance(value, (set, frozenset)):
        return in_order(value, name_of)
    return getattr(value, "__qualname__", None) or repr(value)
