""" """

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hydro_rasda import TuneResult, load
from hydro_rasda.contracts import Event
from hydro_rasda.run import journal
from hydro_rasda.run.events import MessageSaid
from hydro_rasda.run.journal import (
    CHARS,
    MESSAGES,
    MOST_MESSAGES,
    DamagedJournal,
    keep_message,
    read_messages,
    read_units,
)

UNIT = {"event": "unit", "key": "a", "value": None, "seconds": 1, "at": 1.0, "swept": 0.0}
WHOLE = json.dumps(UNIT).encode() + b"\n"


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
        b'{"event": "metrics", "stage": "target", "trial": 0}',
        b'{"event": "metrics", "stage": "target", "trial": "0", "epoch": 1}',
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
    path.write_bytes(WHOLE + odd + b"\n" + WHOLE)
    with pytest.raises(DamagedJournal, match=r"line 2 of .* cannot be read"):
        read_units(path)


def test_a_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for length in range(len(WHOLE)):
        path.write_bytes(WHOLE + WHOLE[:length])
        record = read_units(path)
        assert (list(record.units), record.end, record.damage) == (["a"], len(WHOLE), "")


def line(**told: object) -> bytes:
    return json.dumps(told).encode() + b"\n"


def epoch(trial: int, epoch: int) -> bytes:
    return line(event="metrics", stage="target", trial=trial, epoch=epoch, val_loss=1 / epoch)


def test_a_line_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    """Each line doubled, each line but the units' own, and every part of the whole appended once more."""
    unit = [line(**{**UNIT, "key": key, "at": at}) for at, key in enumerate("abacd")]
    # A unit that was done again went back by an epoch, and came to the same.
    parts = [[epoch(0, 1)], [epoch(1, 1), epoch(1, 2)], [epoch(0, 1), epoch(0, 2), epoch(0, 1)], [], [epoch(1, 3)]]
    lines = [raw for part, own in zip(parts, unit) for raw in (*part, own)]
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(lines))
    once = list(read_units(path).units.items())
    assert [(key, len(told.lines)) for key, told in once] == [("b", 2), ("a", 2), ("c", 0), ("d", 1)]
    doubled = [[raw for raw in lines for _ in range(2)], [raw for raw in lines for _ in range(1 + (raw not in unit))]]
    for first in range(len(lines)):
        doubled += [lines + lines[first:last] for last in range(first, len(lines) + 1)]
    for written in doubled:
        path.write_bytes(b"".join(written))
        assert list(read_units(path).units.items()) == once


def test_what_is_not_known_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event": "of a plug-in"}\n' + WHOLE)
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


def test_they_are_bounded(tmp_path: Path) -> None:
    keep_message(tmp_path, 1.0, "x" * 10 * CHARS)
    for number in range(MOST_MESSAGES + 5):
        keep_message(tmp_path, 1.0, f"{number}")
    found = read_messages(tmp_path)
    assert len(found) == MOST_MESSAGES
    assert found[0].text == "x" * CHARS


@pytest.mark.parametrize("bad", [b"{", b"3", b'{"seconds": "x", "text": 1}', b"\xff\xfe", b'{"text": "no time"}'])
def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path, bad: bytes) -> None:
    keep_message(tmp_path, 1.0, "one")
    with (tmp_path / MESSAGES).open("ab") as file:
        file.write(bad + b"\n")
    keep_message(tmp_path, 2.0, "two")
    assert [message.text for message in read_messages(tmp_path)] == ["one", "two"]
