"""A run's journal, one line for each metric, event and finished unit of work; and beside it the run's messages.

The lines of a unit are written at once, the unit's own last. Lines after the last such line belong to a unit that was
never finished, and do not count. An unreadable line in between was changed by something else than a run. Nobody can
tell which units it belonged to, nor which later units build on them, so nothing is guessed.

The first line names the run. The last field of a unit's line, "sum", is a checksum of all lines up to it. So a line
that was changed, or is missing, is noticed where its unit ends. The last units of a journal can be missing unnoticed: a
run that was killed earlier would not have them either.

A line that was written twice counts once: a copy of a run's folder can double each line, or a whole part. Messages are
a line of JSON each, in a file of their own. Nothing depends on them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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
"""Events of the lines of finished units, and of the first line, which names the run by its `id`."""

FORGOTTEN = {"forgotten": True}
"""Value of a unit that takes back the unit of its key: that work is done again."""

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
"""Fields that lines of an event must have."""

LONGEST = 2**26
"""Most bytes of a line: no run writes a longer one."""

MOST = 2**30
"""Most bytes of a journal: a larger one is not read."""

_AT_ONCE = 2**20
"""Bytes of lines that are parsed at once."""

_LARGEST = 1e15
"""Numbers beyond it are neither times nor counts."""


class DamagedJournal(ValueError):
    """A journal was changed, and finished units follow, or it is another run's; the message names the line and a way
    on."""


@dataclass(frozen=True)
class Record:
    """The content of a journal.

    Attributes:
        units: The finished units by key, in the order in which they finished.
        end: Length in bytes up to the last of them.
        damage: A message on whole lines after that which cannot be read, or were changed; empty if there are none.
        run: The `id` of the run that wrote the journal; empty if it names none.
        sum: The checksum of all lines up to the last unit.
        new: Keys of the units that this reading has found, in order.
        taken_back: True if this reading has found a unit that replaces an earlier one, or takes it back.
        count: Number of lines up to the last unit.
        file: The number of the file in its file system.
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


_SUM = re.compile(rb', "sum": \d+\}\n$')


def encoded(lines: Iterable[JournalLine], own: JournalLine, before: int) -> tuple[bytes, int]:
    """Return the bytes of a unit's lines, its own last, and their checksum; `before` is that of all lines before."""
    raws = [json.dumps(line).encode() + b"\n" for line in lines]
    body = json.dumps(own).encode()
    total = _sum(raws, body, before)
    return b"".join([*raws, body[:-1], b', "sum": %d}\n' % total]), total


def _sum(raws: Iterable[bytes], body: bytes, before: int) -> int:
    """Return the checksum of a unit's lines, in which a repeated one counts once, as the last."""
    return zlib.crc32(body, zlib.crc32(b"".join(dict.fromkeys(reversed([*raws]))), before))


def read_units(path: Path, before: Record | None = None) -> Record:
    """Read a journal, even while a process writes to it.

    Args:
        before: An earlier reading of this journal, whose units come to hold those that were finished since. Only what
            was written since is read, unless another file has taken the journal's place.

    Raises:
        DamagedJournal: if finished units follow a line that cannot be read or was changed, or a line is too long.
        Unsafe: if it is no regular file.
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
    """Read what was written after an earlier reading of a file."""
    units, finished = before.units, before._finished
    end, number, total, run = before.end, before.count, before.sum, before.run
    kept, count, new, taken_back = end, number, list[str](), False
    lines: dict[bytes, JournalLine] = {}
    first, bad, damage = number + 1, 0, ""  # the first line of the unit that is read
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
        # A unit's line has its time, so that no run writes the same line twice.
        if (mark := hash(raw)) not in finished:
            body = _SUM.sub(b"}", raw)
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
    """Yield the whole lines of a file from where it stands, each with its content, or with the reason why it has none.

    Args:
        first: Number of the first of them.
    """
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
    """Return a line that has the fields of its event, or the reason why it is none."""
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
"""Most messages of a run that are kept, the first ones, and most characters of each."""


class Message(NamedTuple):
    """A text for the user, and the wall time of the run when it was said, interrupted sessions included."""

    seconds: float
    text: str


def keep_message(folder: Path, seconds: float, text: str) -> None:
    """Keep a message, unless it was kept before: a resumed run repeats its messages."""
    text = text[:CHARS]
    known = read_messages(folder)
    if len(known) >= MOST_MESSAGES or any(message.text == text for message in known):
        return
    line = {"seconds": round(seconds, 3), "text": text}
    with contextlib.suppress(OSError, Unsafe), append_to(folder / MESSAGES) as file:  # the journal tells of a full disk
        file.write(json.dumps(line).encode() + b"\n")


def read_messages(folder: Path) -> list[Message]:
    """Read the messages of a run so far, in order; lines that cannot be read are left out."""
    found = []
    with contextlib.suppress(OSError, Unsafe):
        for raw in read_file(folder / MESSAGES).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):  # of an integer without end
                line = parse_json(raw)
                found.append(Message(float(line["seconds"]), str(line["text"])))
    return found
