"""Runs that are read again and again while they go on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pytest

from hydro_rasda.results.record_from_journal import Follower, read_record
from hydro_rasda.run import files, journal
from hydro_rasda.run.journal import JOURNAL
from tests.hydro_rasda.journals import write_run


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines of journals that were parsed."""
    found: list[bytes] = []
    parse = files.parse_json_lines

    def noted(raws: Sequence[bytes]) -> list[Any]:
        found.extend(raws)
        return parse(raws)

    monkeypatch.setattr(journal, "parse_json_lines", noted)
    return found


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_a_follower_reads_each_line_once_and_sees_what_a_new_reader_sees(
    tmp_path: Path, parsed: list[bytes], cut: int
) -> None:
    """The journal grows by so many bytes at a time, or by so many lines."""
    write_run(tmp_path / "run", num_samples=9, width=3)
    path = tmp_path / "run" / JOURNAL
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    steps = [b"".join(lines[:end]) for end in range(0, len(lines), cut)] if cut > 1 else [whole[: len(whole) // 2]]
    follower, seen = Follower(tmp_path / "run"), list[bytes]()
    for content in [*steps, whole]:
        path.write_bytes(content)
        parsed.clear()
        record = follower.read()
        seen += [raw for raw in parsed if b'"unit"' in raw]
        assert vars(record) == vars(read_record(tmp_path / "run"))
    assert len(seen) == len(set(seen)) == sum(b'"unit"' in raw for raw in lines)


def test_a_follower_reads_only_the_bytes_that_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a journal that ends with a whole unit each time."""
    write_run(tmp_path / "run", num_samples=200, width=3)
    path = tmp_path / "run" / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    ends = [number for number, raw in enumerate(lines, 1) if raw.startswith(b'{"event": "unit"')]
    opened, read = files.open_to_read, list[int]()

    def counting(of: Path) -> IO[bytes]:
        file = opened(of)
        readline = file.readline

        def counted(size: int) -> bytes:
            raw = readline(size)
            read.append(len(raw))
            return raw

        monkeypatch.setattr(file, "readline", counted, raising=False)
        return file

    monkeypatch.setattr(journal, "open_to_read", counting)
    path.write_bytes(b"".join(lines[: ends[-9]]))
    follower = Follower(tmp_path / "run")
    follower.read()
    assert sum(read) == path.stat().st_size
    for before, end in pairwise(ends[-9:]):
        read.clear()
        with path.open("ab") as file:
            file.write(b"".join(lines[before:end]))
        follower.read()
        assert sum(read) == sum(map(len, lines[before:end]))
    assert follower.read().finished


def test_a_follower_begins_anew_where_another_run_has_taken_the_place(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_samples=9, width=3)
    follower = Follower(tmp_path / "run")
    assert follower.read().finished
    other = tmp_path / "other"
    write_run(other, num_samples=12, width=3, rungs=2)
    for name in ("run.json", JOURNAL):
        (other / name).replace(tmp_path / "run" / name)
    record = follower.read()
    assert (len(record.trials), record.finished) == (12, False)
    assert vars(record) == vars(read_record(tmp_path / "run"))
