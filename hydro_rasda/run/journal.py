"""A run's journal: one line for each metric, event and finished unit of work. A file beside it has the run's messages.

The lines of a unit are written at once, the unit's own line last. Lines after the last unit's line belong to a unit
that was not finished, and do not count. If an earlier line cannot be read, something other than a run has changed the
file. It is then unknown which units are affected, so the journal is refused.

The first line names the run. The last field of a unit's line, "sum", is a checksum of all lines so far. So a changed or
missing line is noticed where its unit ends. Only the last units can go missing unnoticed; the journal then looks like
that of a run that was killed earlier.

A line that occurs twice counts once, because copying a run's folder can double lines or whole parts. Messages are lines
of JSON in a file of their own. No part of a run depends on them.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from hydro_rasda.common.argument_checks import require
from hydro_rasda.history.lines import JournalLine, Unit
from hydro_rasda.run.files import Unsafe, append_to, open_to_read, parse_json, parse_json_lines, read_file

JOURNAL = "journal.jsonl"

UNIT, RUN = "unit", "run"
"""Event names of the line that ends a unit, and of the journal's first line, which holds the run's `id`."""

FORGOTTEN = {"forgotten": True}
"""Value of a unit that takes back the earlier unit of the same key, so that its work is done again."""

_NUMBER = (int, float)

_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    UNIT: {
        "key": str,
        "value": object,
        "seconds": _NUMBER,
        "at": _NUMBER,
        "swept": _NUMBER,
        "left": (int, float, type(None)),
        "sum": int,
    },
    RUN: {"id": str},
    "metrics": {"heat": str, "trial": int, "epoch": int},
    "trial": {"trial": int, "config": dict},
    "failed": {"trial": int, "error": str},
    "retried": {"trial": int},
}
"""Fields that a line must have, by event, and their types."""

LONGEST = 2**26
"""Largest number of bytes in a line. No run writes a longer line."""

MOST = 2**30
"""Largest size of a journal in bytes. A larger journal is not read."""

_AT_ONCE = 2**20
"""Bytes of lines that are parsed together."""

_LARGEST = 1e15
"""Largest number that can be a time or a count."""


class DamagedJournal(ValueError):
    """The journal was changed before its last unit, or belongs to another run.

    The message names the line and says how to continue.
    """


@dataclass(frozen=True)
class Record:
    """The content of a journal.

    Attributes:
        units: The finished units by key, in the order in which they finished.
        end: Length in bytes, up to the last unit.
        damage: A message about whole lines after the last unit that were changed or cannot be read; empty if there are
            none.
        run: The `id` of the run that wrote the journal; empty if the journal names none.
        sum: The checksum of all lines up to the last unit.
        new: Keys of the units that this reading has found, in order.
        taken_back: True if this reading has found a unit that replaces or takes back an earlier one.
        count: Number of lines up to the last unit.
        file: The inode number of the file.
    """

    units: dict[str, Unit]
    end: int = 0
    damage: str = ""
    run: str = ""
    sum: int = 0
    new: Sequence[str] = ()
    taken_back: bool = False
    count: int = 0
    file: int = 0
    _finished: set[int] = field(default_factory=set, repr=False)


_SUM = b', "sum": '


def encoded(lines: Iterable[JournalLine], own: JournalLine, before: int) -> tuple[bytes, int]:
    """Return the bytes of a unit's lines, its own last, and the new checksum; `before` is the checksum so far."""
    raws = [json.dumps(line).encode() + b"\n" for line in lines]
    body = json.dumps(own).encode()
    total = _sum(raws, body, before)
    return b"".join([*raws, body[:-1], _SUM, b"%d}\n" % total]), total


def _sum(raws: Iterable[bytes], body: bytes, before: int) -> int:
    """Return the checksum after a unit's lines. A repeated line counts once, where it occurs last."""
    return zlib.crc32(body, zlib.crc32(b"".join(dict.fromkeys(reversed([*raws]))), before))


def read_units(path: Path, before: Record | None = None) -> Record:
    """Read a journal, even while a process writes to it.

    Args:
        before: An earlier reading of this journal. Only newer lines are read, and their units are added to its `units`.
            If another file has replaced the journal, everything is read.

    Raises:
        DamagedJournal: if finished units follow a line that was changed or cannot be read, or if a line is too long.
        Unsafe: if the journal is not a regular file.
    """
    try:
        file = open_to_read(path)
    except FileNotFoundError:
        return Record({})
    with file:
        found, length = os.fstat(file.fileno()).st_ino, file.seek(0, 2)
        require(length <= MOST, "path", str(path), f"a journal of at most {MOST} bytes")
        if before is None or before.file != found or length < before.end:
            before = Record({}, file=found)
        return _read_on(file, path, before)


def _read_on(file: IO[bytes], path: Path, before: Record) -> Record:
    """Read the lines that were written to a file after the earlier reading `before`."""
    units, finished = before.units, before._finished
    end, number, total, run = before.end, before.count, before.sum, before.run
    kept, count, new, taken_back = end, number, list[str](), False
    lines: dict[bytes, JournalLine] = {}
    first, bad, damage = number + 1, 0, ""  # `first` is the first line of the unit that is being read
    file.seek(end)
    for number, (raw, line) in enumerate(_parsed_lines(file, path, first), first):
        end += len(raw)
        if isinstance(line, ValueError):
            bad, damage = bad or number, damage or f"line {number} of {path} cannot be read ({line})"
            continue
        if line["event"] != UNIT:
            lines.pop(raw, None)
            lines[raw] = line
            run = run or (line["id"] if line["event"] == RUN else "")
            continue
        if damage:
            raise DamagedJournal(
                f"{damage}, and finished units of work follow. Put back what was written, or leave line {bad} "
                f"and all after it out (`head -n {bad - 1}` of the file in its place): that work is then done again"
            )
        # A unit's line contains its time, so no run writes the same line twice. Skip a copy of an earlier line.
        if (mark := hash(raw)) not in finished:
            body = raw[: raw.rfind(_SUM)] + b"}"
            if line["sum"] != (now := _sum(lines, body, total)):
                which = f"line {number}" if first == number else f"one of lines {first} to {number}"
                bad, damage = first, f"{which} of {path} was changed, or a line is missing there or before"
                continue
            total = now
            finished.add(mark)
            taken_back |= units.pop(line["key"], None) is not None
            if line["value"] != FORGOTTEN:
                told = [line for line in lines.values() if line["event"] != RUN]
                at = line["at"], line["swept"], line["left"]
                units[line["key"]] = Unit(line["value"], told, line["seconds"], *at)
                new.append(line["key"])
        lines, kept, count, first = {}, end, number, number + 1
    return Record(units, kept, damage, run, total, new, taken_back, count, before.file, finished)


def _parsed_lines(file: IO[bytes], path: Path, first: int) -> Iterator[tuple[bytes, JournalLine | ValueError]]:
    """Yield the whole lines of a file from line `first` on, each with its content or with the error of parsing it."""
    raws, size = list[bytes](), 0
    for number, raw in enumerate(iter(partial(file.readline, LONGEST + 1), b""), first):
        if len(raw) > LONGEST:
            raise DamagedJournal(f"line {number} of {path} has more than {LONGEST} bytes: no run wrote it")
        if not raw.endswith(b"\n"):
            break
        raws.append(raw)
        size += len(raw)
        if size >= _AT_ONCE:
            yield from zip(raws, _parsed(raws))
            raws, size = [], 0
    yield from zip(raws, _parsed(raws))


def _parsed(raws: Sequence[bytes]) -> Iterator[JournalLine | ValueError]:
    try:
        return map(_checked, parse_json_lines(raws))
    except (ValueError, RecursionError):
        return map(_parsed_alone, raws)


def _parsed_alone(raw: bytes) -> JournalLine | ValueError:
    try:
        return _checked(parse_json(raw))
    except ValueError as error:
        return error


def _checked(line: Any) -> JournalLine | ValueError:
    """Return a line if it has the fields of its event; otherwise a ValueError that says what is wrong."""
    if not isinstance(line, dict) or not isinstance(event := line.get("event"), str):
        return ValueError("no object with an 'event'")
    if event == UNIT:
        line.setdefault("left", None)
    for name, kind in _FIELDS.get(event, {}).items():
        found: Any = line.get(name, ...)
        if found is ... or not isinstance(found, kind):
            return ValueError(f"{event!r} without a proper {name!r}")
        if kind is not object and isinstance(found, _NUMBER) and abs(found) > _LARGEST:
            return ValueError(f"{event!r} without a proper {name!r}")
    return line


MESSAGES = "messages.jsonl"

MOST_MESSAGES, CHARS = 1000, 2000
"""Largest number of messages of a run, and of characters in each. If there are more, the first ones are kept."""


class Message(NamedTuple):
    """A text for the user, and the wall time of the run at that moment, interrupted sessions included."""

    seconds: float
    text: str


def keep_message(folder: Path, seconds: float, text: str) -> None:
    """Append a message to the run's file, unless it is there already, because a resumed run repeats its messages."""
    text = text[:CHARS]
    known = read_messages(folder)
    if len(known) >= MOST_MESSAGES or any(message.text == text for message in known):
        return
    line = {"seconds": round(seconds, 3), "text": text}
    # Ignore errors such as a full disk: no part of a run depends on messages, and the journal reports such errors.
    with contextlib.suppress(OSError, Unsafe), append_to(folder / MESSAGES) as file:
        file.write(json.dumps(line).encode() + b"\n")


def read_messages(folder: Path) -> list[Message]:
    """Read the messages of a run so far, in order; lines that cannot be read are left out."""
    found = []
    with contextlib.suppress(OSError, Unsafe):
        for raw in read_file(folder / MESSAGES).splitlines():
            # `float` raises OverflowError for a huge integer.
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                line = parse_json(raw)
                found.append(Message(float(line["seconds"]), str(line["text"])))
    return found
