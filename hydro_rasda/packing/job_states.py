"""Jobs as they stand, their records, and the journal of all.

A change is in the journal before it takes effect: a job is "running" there before it is started, so that none can run
unseen. After a process was killed, its jobs are settled when the grid is opened again: a job that ended meanwhile has
ended, and one that did not waits again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hydro_rasda.common.argument_checks import require
from hydro_rasda.history.lines import Unit
from hydro_rasda.packing.tasks import Task, pickled
from hydro_rasda.run.files import open_to_read, open_to_write, read_file, refuse_links, refuse_open_to_others
from hydro_rasda.run.run_folder import Store

JobState = Literal["pending", "running", "complete", "failed"]


@dataclass(frozen=True)
class JobRecord:
    """One job.

    Attributes:
        state: "pending", "running", "complete" or "failed".
        attempt: How often it was started.
        device: The device on which it ran last; "" if it never ran.
        alone: True if it has to have a device to itself: memory ran out beside others.
        exit: Exit status, negative for a signal; None where it has not ended by itself.
        error: Why it failed, in words; "" where it did not.
        seconds: That it ran, once it is over.
        memory: Peak of bytes, over all of its processes: of a GPU's memory if it ran on one, 0 if it was not measured.
        share: Of its device, on average; on CPUs, of one core.
        value: The value of a function, as JSON has it.
    """

    name: str
    state: JobState = "pending"
    attempt: int = 0
    device: str = ""
    alone: bool = False
    exit: int | None = None
    error: str = ""
    seconds: float = 0.0
    memory: float = 0.0
    share: float = 0.0
    value: Any = None

    @property
    def over(self) -> bool:
        """Return whether nothing is left to do."""
        return self.state in ("complete", "failed")


@dataclass(frozen=True)
class PackResult:
    """The outcome of all jobs.

    Attributes:
        jobs: One record each, in the order in which they were handed in.
        path: The run's folder; `logs/NAME.log` has what a job wrote.
        seconds: Wall time, that of earlier, interrupted calls included.
    """

    jobs: Sequence[JobRecord]
    path: Path
    seconds: float

    @property
    def failed(self) -> Mapping[str, str]:
        """By the names of jobs that failed, why."""
        return {job.name: job.error for job in self.jobs if job.state == "failed"}

    @property
    def values(self) -> list[Any]:
        """Values of the functions, in their order; None for commands and for failed jobs."""
        return [job.value for job in self.jobs]


JobEnd = Mapping[str, float]
"""How a job ended: its "exit" status, "seconds", "cpu" seconds, and "memory" of the largest of its processes."""

_JOBS = "jobs"

_INSIDE = 2
"""Levels below the run's folder at which the files of jobs lie."""


class Grid:
    """All jobs of a run: those that it has so far must come first in `tasks`; with `retry_failed`, failed ones wait
    again.

    ValueError if a job is another than the one of its name so far, or a function that waits cannot be pickled. Unsafe
    if others own the run's folder or can write to it, or a link in it leads elsewhere.
    """

    def __init__(self, store: Store, tasks: Sequence[Task], retry_failed: bool = False) -> None:
        self._store = store
        self.tasks = {task.name: task for task in tasks}
        asked = {task.name: task.what for task in tasks}
        before = store.units()[_JOBS].value if store.done(_JOBS) else {}
        for name, what in before.items():
            rule = f"{what}, as in the run so far in {store.path}"
            require(asked.get(name) == what, f"jobs[{name!r}]", asked.get(name), rule)
        units = store.units()
        known = {name: JobRecord(**units[key].value) for name in asked if (key := _key(name)) in units}
        self.records = {name: known.get(name, JobRecord(name)) for name in asked}
        for name, record in self.records.items():
            if record.state != "complete" and callable(self.tasks[name].run):
                pickled(self.tasks[name])
        if asked != before:
            store.record(_JOBS, Unit(asked), again=True)
        for folder in ("ends", "logs", "calls"):
            refuse_links(store.path / folder)
            (store.path / folder).mkdir(0o700 if folder == "calls" else 0o777, exist_ok=True)
        # Functions lie there pickled.
        refuse_open_to_others(store.path)
        refuse_open_to_others(store.path / "calls")
        if retry_failed:
            for record in list(self.records.values()):
                if record.state == "failed":
                    self.change(record.name, state="pending", error="", exit=None)

    def change(self, name: str, **fields: Any) -> JobRecord:
        """A job stands otherwise from now on, also after whatever happens to this process."""
        record = replace(self.records[name], **fields)
        unit = self._store.record(_key(name), Unit(asdict(record), seconds=record.seconds), again=True)
        self.records[name] = JobRecord(**unit.value)
        return self.records[name]

    def unsettled(self) -> list[str]:
        """Jobs that an earlier process had started; waits until nothing of them runs."""
        found = [name for name, record in self.records.items() if record.state == "running"]
        for name in found:
            with open_to_write(self.lock(name), _INSIDE) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        return found

    def lock(self, name: str) -> Path:
        """Held locked by a job's processes."""
        return self._store.path / "ends" / f"{name}.lock"

    def end_file(self, name: str) -> Path:
        """Says how the job's present attempt ended."""
        return self._store.path / "ends" / f"{name}.{self.records[name].attempt}.json"

    def log(self, name: str) -> Path:
        return self._store.path / "logs" / f"{name}.log"

    def call_file(self, name: str, suffix: str) -> Path:
        """A function's pickle, or what it returned in the present attempt."""
        return self._store.path / "calls" / f"{name}.{self.records[name].attempt}.{suffix}"

    def end(self, name: str) -> JobEnd | None:
        """How a job's present attempt ended; None where it did not end by itself."""
        file = self.end_file(name)
        return dict(json.loads(read_file(file, _INSIDE))) if file.exists() else None

    def value(self, name: str) -> Any:
        """Return the value of a function; None for a command, ValueError if its file cannot be read."""
        file = self.call_file(name, "json")
        return json.loads(read_file(file, _INSIDE)) if file.exists() else None

    def forget_files(self, name: str) -> None:
        """Once the journal knows how a job ended."""
        for file in (self.end_file(name), self.lock(name), *(self.call_file(name, s) for s in ("pickle", "json"))):
            file.unlink(missing_ok=True)

    def log_tail(self, name: str) -> str:
        """The end of what a job wrote, at most 4,000 bytes."""
        file = self.log(name)
        if not file.exists():
            return ""
        with open_to_read(file, _INSIDE) as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - 4000))
            return opened.read().decode(errors="replace")


def _key(name: str) -> str:
    return f"job/{name}"
