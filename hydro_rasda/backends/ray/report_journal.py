"""The scheduler's own record of a Ray Tune experiment: one JSON line a report.

Ray drops a scheduler's state on every resume. This file does not: it says what each rung has seen, what was decided,
and how many workers a trial had (the paper's Fig. 7).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hydro_rasda.common.argument_checks import check_path, require
from hydro_rasda.schedulers import AshaState, Decision

FILE_NAME = "rasda.jsonl"


@dataclass(frozen=True)
class JournalEntry:
    """One report.

    Attributes:
        t: Its training iteration.
        score: Its metric; None where it was not finite.
        milestone: The milestone that the report was decided at; None where it decided nothing.
        decision: "continue", "stop", or "wait" for its cohort; what is then decided is an entry of its own.
        global_batch_size: Samples per step over all workers, where the trial reports it.
    """

    trial: str
    t: int
    score: float | None
    workers: int
    milestone: int | None = None
    decision: str = Decision.CONTINUE.value
    global_batch_size: int | None = None


class Journal:
    """Appends to a file of the experiment's own storage, parsed once; `entries` has earlier processes' reports, too."""

    def __init__(self, filesystem: Any, folder: str) -> None:
        self._filesystem = filesystem
        self._path = str(PurePosixPath(folder) / FILE_NAME)
        self.entries = self._read()

    def append(self, entry: JournalEntry) -> None:
        """Add one entry. Storage that cannot append is written as a whole, at milestones only."""
        self.entries.append(entry)
        try:
            with self._filesystem.open_append_stream(self._path) as stream:
                stream.write(_line(entry))
        except NotImplementedError:
            if entry.milestone is not None:
                self._write(self.entries)

    def _write(self, entries: Iterable[JournalEntry]) -> None:
        with self._filesystem.open_output_stream(self._path) as stream:
            stream.write(b"".join(map(_line, entries)))

    def _read(self) -> list[JournalEntry]:
        try:
            with self._filesystem.open_input_stream(self._path) as stream:
                text = stream.read().decode()
        except FileNotFoundError:
            return []
        entries = _parsed(text)
        if text.rpartition("\n")[2]:
            # Half a line is cut off before anything is appended to it.
            self._write(entries)
        return entries


def replay(entries: Iterable[JournalEntry], trials: set[str]) -> AshaState:
    """The rungs as `entries` left them, counting `trials` alone."""
    state = AshaState()
    for entry in entries:
        if entry.trial in trials and entry.milestone is not None:
            score = math.nan if entry.score is None else entry.score
            state = state.recorded(entry.milestone, entry.trial, score)
    return state


def read_journal(folder: str) -> list[JournalEntry]:
    """The reports of an experiment, in order of arrival.

    A report that a trial repeated after a failure is in it twice; the later one counts.

    Args:
        folder: Of the experiment: a path, or the address of a store, such as "s3://bucket/ray_results/experiment".

    Raises:
        ValueError: if the folder holds no such file, or its store cannot be asked.
    """
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, LocalFileSystem

    check_path("folder", folder)
    rule = f"that of an experiment, which holds a file {FILE_NAME}"
    try:
        if "://" in str(folder):
            filesystem, root = FileSystem.from_uri(str(folder))
        else:
            filesystem, root = LocalFileSystem(), str(Path(folder).expanduser())
        path = str(PurePosixPath(root) / FILE_NAME)
        found = filesystem.get_file_info(path).is_file
    except (OSError, ArrowException) as error:
        raise ValueError(f"`folder` is {str(folder)!r}, but must be {rule}: {error}") from error
    require(found, "folder", folder, rule)
    with filesystem.open_input_stream(path) as stream:
        return _parsed(stream.read().decode())


def _parsed(text: str) -> list[JournalEntry]:
    """Return the entries of all whole lines: a killed process may leave half a line, and another one may write now."""
    return [JournalEntry(**json.loads(line)) for line in text.rpartition("\n")[0].splitlines()]


def _line(entry: JournalEntry) -> bytes:
    return json.dumps(vars(entry), allow_nan=False).encode() + b"\n"


class RungHistory:
    """The rungs, and what was decided of each trial.

    A killed process may have decided more than Ray had saved: what a restored trial repeats is not decided anew.

    Attributes:
        stopped: By trial, the milestone at which it was stopped, whatever it repeats after that.
        undecided: By restored trial, the report with which it waited to be decided.
    """

    def __init__(self) -> None:
        self.stopped: dict[str, int] = {}
        self.undecided: dict[str, JournalEntry] = {}
        self._journal: Journal | None = None
        self._rungs: AshaState | None = None
        self._known: set[str] = set()
        self._before: set[str] = set()

    def open(self, journal: Journal) -> None:
        """Take in what earlier processes wrote, and write to the same journal from now on."""
        last = {entry.trial: entry for entry in journal.entries}
        self._journal, self._before = journal, set(last)
        self.undecided = {name: entry for name, entry in last.items() if entry.decision == Decision.WAIT}
        self.stopped = {
            entry.trial: entry.milestone
            for entry in journal.entries
            if entry.decision == Decision.STOP and entry.milestone is not None
        }

    def know(self, trial: str) -> bool:
        """Count a trial's scores, those of an earlier process among them; returns whether nobody knew it before.

        In a restored experiment, a trial that begins anew has a new name and the bundles that it had grown to.
        """
        if trial in self._known:
            return False
        self._known.add(trial)
        if trial in self._before:
            self._rungs = None
        return not self._before

    @property
    def rungs(self) -> AshaState:
        """The scores at each milestone, of the trials that are known."""
        if self._rungs is None:
            entries = self._journal.entries if self._journal else ()
            self._rungs = replay(entries, self._known)
        return self._rungs

    @rungs.setter
    def rungs(self, rungs: AshaState) -> None:
        self._rungs = rungs

    def append(self, entry: JournalEntry) -> None:
        """Write down a report; see `Journal.append`."""
        assert self._journal is not None
        self._journal.append(entry)
