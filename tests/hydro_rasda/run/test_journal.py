""" """

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hydro_rasda import TuneResult, load
from hydro_rasda.contracts import Event
from hydro_rasda.history.lines import JournalLine
from hydro_rasda.run import journal
from hydro_rasda.run.events import MessageSaid
from hydro_rasda.run.journal import (
    CHARS,
    MESSAGES,
    DamagedJournal,
    encoded,
    keep_message,
    read_messages,
    read_units,
)

UNIT = {"event": "unit", "key": "a", "value": None, "seconds": 1, "at": 1.0, "swept": 0.0}
WHOLE, SUM = encoded([], UNIT, 0)


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"3",
        b"null",
        b"[]",
        b"{}",
        b'"unit"',
        b'{"event": 3}',
        b'{"event": "unit"}',
        b"\xff\xfe",
        b"\0" * 40,
        *(json.dumps({**UNIT, name: []}).encode() for name in ("key", "seconds", "at", "swept", "left")),
        b'{"event": "metrics", "heat": "race", "trial": 0}',
        b'{"event": "metrics", "heat": "race", "trial": "0", "epoch": 1}',
        b'{"event": "trial", "trial": 0, "config": []}',
        b'{"event": "failed", "trial": 0}',
        WHOLE.replace(b"1.0", b"NaN").strip(),
        WHOLE.replace(b"1.0", b"1e999").strip(),
        WHOLE.replace(b"1.0", b"1" + b"0" * 400).strip(),
        b'{"event": "a", "b": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_an_odd_line_is_named(tmp_path: Path, odd: bytes) -> None:
    """Between finished units it is refused; after the last of them it is left out."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(WHOLE + odd + b"\n")
    record = read_units(path)
    assert (list(record.units), record.end) == (["a"], len(WHOLE))
    assert f"line 2 of {path} cannot be read" in record.damage
    path.write_bytes(WHOLE + odd + b"\n" + encoded([], {**UNIT, "key": "b"}, SUM)[0])
    with pytest.raises(DamagedJournal, match=r"line 2 of .* cannot be read"):
        read_units(path)


def test_a_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for length in range(len(WHOLE)):
        path.write_bytes(WHOLE + WHOLE[:length])
        record = read_units(path)
        assert (list(record.units), record.end, record.damage) == (["a"], len(WHOLE), "")


def epoch(trial: int, epoch: int) -> JournalLine:
    return {"event": "metrics", "heat": "race", "trial": trial, "epoch": epoch, "val_loss": 1 / epoch}


def written(parts: Sequence[Sequence[JournalLine]], keys: Sequence[str], run: str = "") -> bytes:
    """A journal of these units, each with the lines of its part."""
    whole, total = b"", 0
    for at, (lines, key) in enumerate(zip(parts, keys, strict=True)):
        first = [{"event": "run", "id": run}] if run and not at else []
        added, total = encoded([*first, *lines], {**UNIT, "key": key, "at": at}, total)
        whole += added
    return whole


PARTS = [[epoch(0, 1), epoch(1, 1)], [epoch(0, 2)], [], [epoch(1, 2)]]


@pytest.mark.parametrize("change", ["left out", "other digits", "other order"])
def test_a_line_that_was_changed_or_is_missing_is_noticed(tmp_path: Path, change: str) -> None:
    """If another unit follows, it is refused, and lines before the damage can be kept; else its work is done again."""
    path = tmp_path / "journal.jsonl"
    lines = written(PARTS, "abcd", "run 1").splitlines(keepends=True)
    path.write_bytes(b"".join(lines))
    whole = list(read_units(path).units.items())
    assert [key for key, _ in whole] == [*"abcd"]
    refused = 0
    for at, raw in enumerate(lines[: -1 if change == "other order" else None]):
        digits = raw.translate(bytes.maketrans(b"0123456789", b"1234567890"))
        other = {"left out": [], "other digits": [digits], "other order": [lines[(at + 1) % len(lines)], raw]}[change]
        path.write_bytes(b"".join([*lines[:at], *other, *lines[at + max(1, len(other)) :]]))
        try:
            record = read_units(path)
        except DamagedJournal as damage:
            refused += 1
            kept = re.search(r"`head -n (\d+)`", str(damage))
            assert kept is not None
            assert int(kept[1]) <= at
            path.write_bytes(b"".join(lines[: int(kept[1])]))
            record = read_units(path)
        else:
            assert record.damage or at == len(lines) - 1
        assert list(record.units.items()) == whole[: len(record.units)]
        assert len(record.units) < len(whole)
    assert refused >= 5


def test_a_journal_is_as_long_as_before_and_a_little_more() -> None:
    """Each unit is one write of its own lines; nothing before is read again."""
    total, lengths = 0, []
    for at in range(1000):
        added, total = encoded([epoch(0, 1)], {**UNIT, "at": 1000 + at}, total)
        lengths.append(len(added))
    assert max(lengths) - min(lengths) <= 10


def test_a_line_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    """Each line doubled, each line but the units' own, and every part of the whole appended once more."""
    # A unit that was done again went back by an epoch, and came to the same.
    parts = [[epoch(0, 1)], [epoch(1, 1), epoch(1, 2)], [epoch(0, 1), epoch(0, 2), epoch(0, 1)], [], [epoch(1, 3)]]
    whole = written(parts, "abacd")
    lines = whole.splitlines(keepends=True)
    unit = [raw for raw in lines if b'"unit"' in raw]
    path = tmp_path / "journal.jsonl"
    path.write_bytes(whole)
    once = list(read_units(path).units.items())
    assert [(key, len(told.lines)) for key, told in once] == [("b", 2), ("a", 2), ("c", 0), ("d", 1)]
    doubled = [[raw for raw in lines for _ in range(2)], [raw for raw in lines for _ in range(1 + (raw not in unit))]]
    for first in range(len(lines)):
        doubled += [lines + lines[first:last] for last in range(first, len(lines) + 1)]
    for repeated in doubled:
        path.write_bytes(b"".join(repeated))
        assert list(read_units(path).units.items()) == once


def test_what_is_not_known_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(encoded([{"event": "of a plug-in"}], UNIT, 0)[0])
    assert read_units(path).units["a"].lines == [{"event": "of a plug-in"}]


def test_where_there_is_no_journal_there_are_no_units(tmp_path: Path) -> None:
    record = read_units(tmp_path / "journal.jsonl")
    assert (record.units, record.end, record.damage) == ({}, 0, "")


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LONGEST", 1000)
    (tmp_path / "journal.jsonl").write_bytes(WHOLE + b"x" * 2000)
    with pytest.raises(DamagedJournal, match=r"line 2 of .* has more than 1000 bytes"):
        read_units(tmp_path / "journal.jsonl")
    monkeypatch.setattr(journal, "MOST", 1000)
    with pytest.raises(ValueError, match="a journal of at most 1000 bytes"):
        read_units(tmp_path / "journal.jsonl")


def test_what_is_said_can_be_read_later_and_is_not_repeated_by_who_goes_on(
    quick: Callable[..., TuneResult], tmp_path: Path
) -> None:
    said: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, MessageSaid):
            said.append(event.text)

    quick(num_samples=4, callbacks=[hear])
    assert [message.text for message in load(tmp_path / "run").messages] == said
    again = quick(num_samples=4, callbacks=[hear])
    assert [message.text for message in again.messages] == list(dict.fromkeys(said))
    seconds = [message.seconds for message in again.messages]
    assert seconds == sorted(seconds)


def test_they_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 20
    monkeypatch.setattr(journal, "MOST_MESSAGES", most)
    keep_message(tmp_path, 1.0, "x" * 10 * CHARS)
    for number in range(most + 5):
        keep_message(tmp_path, 1.0, f"{number}")
    found = read_messages(tmp_path)
    assert len(found) == most
    assert found[0].text == "x" * CHARS


@pytest.mark.parametrize("bad", [b"{", b"3", b'{"seconds": "x", "text": 1}', b"\xff\xfe", b'{"text": "no time"}'])
def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path, bad: bytes) -> None:
    keep_message(tmp_path, 1.0, "one")
    with (tmp_path / MESSAGES).open("ab") as file:
        file.write(bad + b"\n")
    keep_message(tmp_path, 2.0, "two")
    assert [message.text for message in read_messages(tmp_path)] == ["one", "two"]
