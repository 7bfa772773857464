import math
import os
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
from fsspec.implementations.local import LocalFileSystem

from hydro_rasda.backends.ray.report_journal import JournalEntry, RungHistory, read_journal, replay
from hydro_rasda.schedulers import RASDA

ENTRIES = [
    JournalEntry("a", 1, 0.5, 1, milestone=1, global_batch_size=32),
    JournalEntry("b", 1, None, 1, milestone=1, decision="stop"),
    JournalEntry("a", 2, 0.25, 2, milestone=2),
    JournalEntry("a", 3, 0.25, 4),
]


def journal(folder: Path, filesystem: Any = None) -> RungHistory:
    history = RungHistory()
    history.open(filesystem or pyarrow.fs.LocalFileSystem(), str(folder))
    return history


def test_a_new_process_goes_on_where_another_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = journal(tmp_path)
    for entry in ENTRIES[:2]:
        first.append(entry)
    second = journal(tmp_path)
    for entry in ENTRIES[2:]:
        second.append(entry)
    assert list(journal(tmp_path).entries) == ENTRIES
    assert read_journal(str(tmp_path)) == read_journal(tmp_path.as_uri()) == ENTRIES
    monkeypatch.setenv("HOME", str(tmp_path.parent))  # Ray's own folder is ~/ray_results
    assert read_journal(f"~/{tmp_path.name}") == ENTRIES


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.append(ENTRIES[0])
    with (tmp_path / "rasda.jsonl").open("a") as file:
        file.write('{"trial": "b", "t": 1, "sco')
    assert read_journal(str(tmp_path)) == ENTRIES[:1]
    journal(tmp_path).append(ENTRIES[2])
    assert read_journal(str(tmp_path)) == [ENTRIES[0], ENTRIES[2]]


def test_a_journal_of_whole_lines_is_read_without_being_written(tmp_path: Path) -> None:
    """A process that is killed while it writes the file anew would lose the journal."""
    first = journal(tmp_path)
    for entry in ENTRIES:
        first.append(entry)
    os.utime(tmp_path / "rasda.jsonl", (0, 0))
    assert journal(tmp_path).entries == ENTRIES
    assert (tmp_path / "rasda.jsonl").stat().st_mtime == 0


class NoAppend:
    """A real file system without its appends, as object stores are."""

    type_name = "s3"

    def __init__(self) -> None:
        self._local = pyarrow.fs.LocalFileSystem()

    def open_append_stream(self, path: str) -> None:
        raise NotImplementedError

    def open_output_stream(self, path: str) -> object:
        return self._local.open_output_stream(path)

    def open_input_stream(self, path: str) -> object:
        return self._local.open_input_stream(path)


def test_storage_that_cannot_append_is_written_at_milestones(tmp_path: Path) -> None:
    remote = journal(tmp_path, NoAppend())
    remote.append(ENTRIES[3])
    assert not (tmp_path / "rasda.jsonl").exists()
    remote.append(ENTRIES[0])
    assert read_journal(str(tmp_path)) == [ENTRIES[3], ENTRIES[0]]


def test_a_store_that_does_not_answer_once_ends_no_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(path: str) -> None:
        raise OSError("no answer")

    store = NoAppend()
    remote = journal(tmp_path, store)
    with monkeypatch.context() as patch:
        patch.setattr(store, "open_output_stream", silent)
        remote.append(ENTRIES[0])
    assert "could not be written at a milestone of trial a" in caplog.text
    remote.append(ENTRIES[1])
    assert read_journal(str(tmp_path)) == ENTRIES[:2]


class Overwrites(LocalFileSystem):  # type: ignore[misc]
    """Overwrites a file that is opened to append to it, as gcsfs does."""

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        return super()._open(path, mode.replace("a", "w"), **more)


def test_storage_that_overwrites_what_is_appended_keeps_all_reports(tmp_path: Path) -> None:
    remote = journal(tmp_path, pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(Overwrites())))
    for entry in ENTRIES[:3]:
        remote.append(entry)
    assert read_journal(str(tmp_path)) == ENTRIES[:3]


def test_replay_gives_the_rungs_back() -> None:
    rule = RASDA(max_t=8)
    state = rule.init()
    for trial, t, score in [("a", 1, 0.5), ("b", 1, math.nan), ("a", 2, 0.25)]:
        state, _ = rule.report(state, trial, t, score)
    assert replay(ENTRIES, {"a", "b"}) == state


def test_replay_leaves_out_trials_of_another_experiment() -> None:
    assert set(replay(ENTRIES, {"b"}).rungs[1]) == {"b"}
