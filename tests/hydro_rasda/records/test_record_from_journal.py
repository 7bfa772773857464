"""Runs that are read again and again while they go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO, Any

import pytest

from hydro_rasda import RaceConfig
from hydro_rasda.history.history import FINALISTS
from hydro_rasda.history.lines import JournalLine
from hydro_rasda.records.record_from_journal import Follower, read_record
from hydro_rasda.run import files, journal
from hydro_rasda.run.journal import JOURNAL
from hydro_rasda.settings.config import TuneConfig
from tests.hydro_rasda.journals import Writer, epochs, signed, with_live, write_run


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


def test_epochs_of_full_size_models_are_read_as_they_come_and_change_nothing_else(
    tmp_path: Path, parsed: list[bytes]
) -> None:
    """A follower reads each once, also those that an interrupted process trained and the next one trains again."""
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        write_run(folder, num_samples=9, width=3)
    whole = [json.loads(line) for line in (run / JOURNAL).read_text().splitlines()]
    lines = with_live(whole)
    ends = [i for i, line in enumerate(lines) if line.get("key", "").endswith("/at-2")]
    lines[ends[0] + 1 : ends[0] + 1] = [
        {**lines[at], "key": lines[at]["key"] + "/again"} for at in (ends[0] - 2, ends[0])
    ]
    ends = [i + 1 for i, line in enumerate(whole) if line["event"] == "unit"]
    follower, shown, seen = Follower(run), list[list[int]](), list[bytes]()
    for end in range(len(lines) + 1):
        (run / JOURNAL).write_bytes(signed(lines[:end]))
        parsed.clear()
        record = follower.read()
        seen += [raw for raw in parsed if b'"unit"' in raw]
        assert vars(record) == vars(read_record(run))
        # The same journal without them: then all lines come with the checkpoint.
        count = sum(line["event"] == "unit" and "/at-" not in line["key"] for line in lines[:end])
        (other / JOURNAL).write_bytes(signed(whole[: ends[count - 1]] if count else []))
        without = read_record(other)
        assert tuple(replace(trial, live=()) for trial in record.trials) == without.trials
        assert (record.best_trial, record.finished, record.ended) == (
            without.best_trial,
            without.finished,
            without.ended,
        )
        assert replace(record.cost, seconds=0.0) == replace(without.cost, seconds=0.0)
        shown += [[line["epoch"] for line in trial.live] for trial in record.trials if trial.live]
    assert record.finished
    assert [live for live, _ in groupby(shown)][:6] == [[1], [1, 2], [1], [1, 2], [1, 2, 3], [1]]
    assert len(seen) == len(set(seen)) == sum(line["event"] == "unit" for line in lines)


def test_trials_of_an_earlier_race_are_stopped_once_others_race(tmp_path: Path) -> None:
    """As with `resume="changed"`, which takes back what the earlier race decided."""
    writer = Writer(tmp_path / "run", TuneConfig(num_samples=4, max_t=9, race=RaceConfig(top_k=2)))
    config = {"lr": 0.01, "optimizer": "adamw", "activation": "relu", "dropout": 0.1}
    numbers = [0, 1, 2, 3]
    told: list[JournalLine] = [{"event": "trial", "trial": n, "config": config} for n in numbers]
    writer.unit("sweep/kinds-from-0", dict.fromkeys(map(str, numbers), "a"), told)
    writer.unit("sweep/admitted-from-0", {"trials": numbers, "samples": 4})
    writer.unit("sweep/begin/of-4-0", [[n, 1] for n in numbers])
    swept = [line for n in numbers for line in epochs("sweep", n, config, 0, 1)]
    writer.unit("sweep/to-1/from-0/group-0", {"members": numbers, "stop": 1, "groups": [numbers]}, swept)

    def statuses() -> list[str]:
        return [trial.status for trial in writer.record.trials]

    for finalists, entered in (([0, 1], "race/entered"), ([2, 3], "race/entered/again")):
        writer.unit("call", {"samples": 4})
        writer.unit(FINALISTS, finalists)
        writer.unit(entered, finalists)
        for n in finalists:
            writer.unit(f"race/trial-{n}/to-3", {"checkpoint": f"race/trial-{n}/to-3"}, epochs("race", n, config, 0, 3))
            assert statuses()[finalists[0] : finalists[1] + 1] == ["undecided"] * 2
    assert statuses() == ["stopped", "stopped", "undecided", "undecided"]
