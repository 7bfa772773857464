"""The scheduler's own record of a Ray Tune experiment: one JSON line per report.

Ray drops a scheduler's state on every resume. This file keeps it: the scores of each rung, the decisions, and the
number of workers of each trial (the paper's Fig. 7).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hydro_rasda.common.argument_checks import check_path, is_number, require
from hydro_rasda.schedulers import AshaState, Decision

FILE_NAME = "rasda.jsonl"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JournalEntry:
    """One report of a trial.

    Attributes:
        t: The training iteration of the report.
        score: The metric; None if it was not finite.
        milestone: The milestone at which the report led to a decision; None if it led to none.
        decision: "continue", "stop", or "wait" for the cohort. After "wait", the decision has an entry of its own.
        global_batch_size: Samples per step over all workers, if the trial reports it.
    """

    trial: str
    t: int
    score: float | None
    workers: int
    milestone: int | None = None
    decision: str = Decision.CONTINUE.value
    global_batch_size: int | None = None


def as_float(value: Any) -> float | None:
    """Return a report's value as a float, which may be NaN; None if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # None, a text, a tensor of several numbers, 10**400
        return None


def plain_number(value: Any) -> Any:
    """Return a report's value as a Python number; None if it is no finite number, which the journal could not hold."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, TypeError, ValueError):  # a tensor or an array of several numbers
        return None
    return number if is_number(number) else None


def replay(entries: Iterable[JournalEntry], trials: set[str]) -> AshaState:
    """Return the scores of each rung after these entries of the journal. Only scores of `trials` count."""
    state = AshaState()
    for entry in entries:
        if entry.trial in trials and entry.milestone is not None:
            score = math.nan if entry.score is None else entry.score
            state = state.recorded(entry.milestone, entry.trial, score)
    return state


def read_journal(folder: str) -> list[JournalEntry]:
    """Read the reports of an experiment, in order of arrival.

    If a trial repeated a report after a failure, the report is in the journal twice; the later entry counts.

    Args:
        folder: The experiment's folder: a path, or an address such as "s3://bucket/ray_results/experiment".

    Raises:
        ValueError: if the folder has no such file, a line of it is damaged, or the storage does not answer.
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
        return _parsed(stream.read().decode(), path)


def _parsed(text: str, path: str) -> list[JournalEntry]:
    """Return the entries of whole lines. The last line is incomplete if a process was killed, or writes now."""
    entries = []
    for number, line in enumerate(text.rpartition("\n")[0].splitlines(), start=1):
        try:
            entries.append(JournalEntry(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {number} of {path} is no report of a trial: {line[:80]!r}") from error
    return entries


def _line(entry: JournalEntry) -> bytes:
    return json.dumps(vars(entry), allow_nan=False).encode() + b"\n"


class RungHistory:
    """The reports of an experiment in its file, the rungs, and the decisions on each trial.

    A killed process may have decided more than Ray had saved. Reports that a restored trial repeats are not decided
    again.

    Attributes:
        entries: The reports, also those of earlier processes.
        stopped: Maps a trial to the milestone at which it was stopped. Later reports do not change that.
        undecided: Maps a restored trial to the report with which it waited for a decision.
    """

    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []
        self.stopped: dict[str, int] = {}
        self.undecided: dict[str, JournalEntry] = {}
        self._filesystem: Any = None
        self._path = ""
        self._rungs: AshaState | None = None
        self._known: set[str] = set()
        self._before: set[str] = set()

    def open(self, filesystem: Any, folder: str) -> None:
        """Read what earlier processes wrote to the experiment's storage, and append to the same file from now on."""
        self._filesystem, self._path = filesystem, str(PurePosixPath(folder) / FILE_NAME)
        self.entries = self._read()
        last = {entry.trial: entry for entry in self.entries}
        self._before = set(last)
        self.undecided = {name: entry for name, entry in last.items() if entry.decision == Decision.WAIT}
        self.stopped = {
            entry.trial: entry.milestone
            for entry in self.entries
            if entry.decision == Decision.STOP and entry.milestone is not None
        }

    def know(self, trial: str) -> bool:
        """From now on, count a trial's scores in `rungs`, also those of an earlier process.

        Return True for a new trial of a new experiment. In a restored experiment, return False: there, a trial that
        begins anew has a new name, but keeps the bundles to which it had grown.
        """
        if trial in self._known:
            return False
        self._known.add(trial)
        if trial in self._before:
            self._rungs = None
        return not self._before

    @property
    def rungs(self) -> AshaState:
        """The scores of the known trials at each milestone."""
        if self._rungs is None:
            self._rungs = replay(self.entries, self._known)
        return self._rungs

    @rungs.setter
    def rungs(self, rungs: AshaState) -> None:
        self._rungs = rungs

    def append(self, entry: JournalEntry) -> None:
        """Append a report to the file. If the storage cannot append, write the whole file, but only at milestones."""
        self.entries.append(entry)
        if self._appended(_line(entry)) or entry.milestone is None:
            return
        try:
            self._write(self.entries)
        except OSError as error:  # the next milestone writes these entries, too
            logger.warning(f"{self._path} could not be written at a milestone of trial {entry.trial}: {error}")

    def _appended(self, line: bytes) -> bool:
        """Append a line to the file. Return False, and leave the file as it is, if the storage cannot append."""
        # Some of fsspec's file systems, such as gcsfs, overwrite a file that is opened to append to it.
        if self._filesystem.type_name.startswith("py::fsspec"):
            return False
        try:
            with self._filesystem.open_append_stream(self._path) as stream:
                stream.write(line)
        except NotImplementedError:
            return False
        return True

    def _write(self, entries: Iterable[JournalEntry]) -> None:
        with self._filesystem.open_output_stream(self._path) as stream:
            stream.write(b"".join(map(_line, entries)))

    def _read(self) -> list[JournalEntry]:
        try:
            with self._filesystem.open_input_stream(self._path) as stream:
                text = stream.read().decode()
        except FileNotFoundError:
            return []
        entries = _parsed(text, self._path)
        if text.rpartition("\n")[2]:
            # Cut off the incomplete line at the end, because the next entry would be appended to it.
            self._write(entries)
        return entries
