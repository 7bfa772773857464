"""The scheduler's own record of a Ray Tune experiment: one JSON line a report.

Ray drops a scheduler's state and loses rows of ``result.json`` on every resume. This file loses neither: it
says what each rung has seen, what was decided, and how many workers a trial had (the paper's Fig. 7).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hydro_rasda.schedulers import AshaState, Decision

FILE_NAME = "rasda.jsonl"


@dataclass(frozen=True)
class Entry:
    """One report.

    Attributes:
        trial: The trial's id.
        t: Its training iteration.
        score: Its metric; None where it was not finite.
        workers: Workers that it trained with.
        milestone: The milestone that the report was decided at; None where it decided nothing.
        decision: "continue" or "stop".
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
    """Appends entries to a file of the experiment's own storage.

    Args:
        filesystem: A pyarrow file system.
        folder: The experiment's folder on it.
    """

    def __init__(self, filesystem: Any, folder: str) -> None:
        self._filesystem = filesystem
        self._path = str(PurePosixPath(folder) / FILE_NAME)
        self._lines = self._read()

    def entries(self) -> Iterator[Entry]:
        """What was appended, by this process and by those before it, in order."""
        return (Entry(**json.loads(line)) for line in self._lines)

    def append(self, entry: Entry) -> None:
        """Adds one entry. Storage that cannot append is written as a whole, at milestones only."""
        line = json.dumps(asdict(entry), allow_nan=False)
        self._lines.append(line)
        try:
            with self._filesystem.open_append_stream(self._path) as stream:
                stream.write(f"{line}\n".encode())
        except NotImplementedError:
            if entry.milestone is not None:
                self._write_all()

    def _write_all(self) -> None:
        with self._filesystem.open_output_stream(self._path) as stream:
            stream.write("".join(f"{line}\n" for line in self._lines).encode())

    def _read(self) -> list[str]:
        try:
            with self._filesystem.open_input_stream(self._path) as stream:
                text = stream.read().decode()
        except FileNotFoundError:
            return []
        complete, _, torn = text.rpartition("\n")
        lines: list[str] = complete.splitlines()
        if torn:
            # A killed process may leave half a line; it is cut off before anything is appended to it.
            self._lines = lines
            self._write_all()
        return lines


def replay(entries: Iterable[Entry], trials: set[str], earlier: AshaState | None = None) -> AshaState:
    """The rungs as ``entries`` left them, counting ``trials`` alone, on top of what came to them earlier."""
    state = earlier or AshaState()
    for entry in entries:
        if entry.trial in trials and entry.milestone is not None:
            score = math.nan if entry.score is None else entry.score
            state = state.recorded(entry.milestone, entry.trial, score)
    return state


def read_journal(folder: str) -> list[Entry]:
    """The reports of an experiment in a local folder, in order of arrival.

    A report that a trial repeated after a failure is in it twice; the later one counts.
    """
    with open(Path(folder) / FILE_NAME, encoding="utf-8") as file:
        return [Entry(**json.loads(line)) for line in file]
