"""The states of jobs, their records, and the journal of all jobs.

A change is written to the journal before it takes effect. For example, a job is "running" there before it is started,
so that no job runs without a record. If the process of `pack` is killed, the next call settles its jobs. It records the
end of each job that ended by itself, and lets any other job wait again.
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
        attempt: The number of times that the job was started.
        device: The device on which the job ran last; "" if it never ran.
        alone: True if the job needs a device to itself, because memory ran out beside others.
        exit: Exit status, negative for a signal; None if the job has not ended by itself.
        error: Why the job failed, in words; "" if it did not fail.
        seconds: Run time of the job; 0 before it has ended.
        memory: Peak bytes of all processes of the job together, in GPU memory if it ran on a GPU; 0 if not measured.
        share: The average share of a device that the job kept busy: of one core, or of a GPU whose `compute` is 1. 0 if
            not measured.
        value: The value that a function returned, as read from JSON; None for a command.
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
        """Return whether the job has completed or failed."""
        return self.state in ("complete", "failed")


@dataclass(frozen=True)
class PackResult:
    """The outcome of all jobs.

    Attributes:
        jobs: The records of the jobs, in the order in which `pack` got them.
        path: The run's folder; `logs/NAME.log` has the output of a job.
        seconds: Wall time of the run, including earlier, interrupted calls.
    """

    jobs: Sequence[JobRecord]
    path: Path
    seconds: float

    @property
    def failed(self) -> Mapping[str, str]:
        """The errors of the jobs that failed, by name."""
        return {job.name: job.error for job in self.jobs if job.state == "failed"}

    @property
    def values(self) -> list[Any]:
        """The values of all jobs, in order; None for commands and for failed jobs."""
        return [job.value for job in self.jobs]


JobEnd = Mapping[str, float]
"""How a job ended: its "exit" status, "seconds", "cpu" seconds, and "memory" of the largest of its processes."""

_JOBS = "jobs"

_INSIDE = 2
"""The depth of the jobs' files below the run's folder."""


class Grid:
    """All jobs of a run. `tasks` must include the jobs of earlier calls. With `retry_failed`, failed jobs wait again.

    Raises ValueError if a job differs from the run's job of the same name, or if the function of a waiting job cannot
    be pickled. Raises Unsafe if others own the run's folder or can write to it, or if a link in it leads elsewhere.
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
        # The folder has pickled functions. Anyone who can write to it could run code as this user.
        refuse_open_to_others(store.path)
        refuse_open_to_others(store.path / "calls")
        if retry_failed:
            for record in list(self.records.values()):
                if record.state == "failed":
                    self.change(record.name, state="pending", error="", exit=None)

    def change(self, name: str, **fields: Any) -> JobRecord:
        """Change the record of a job, first in the journal, so that the change survives the death of this process."""
        record = replace(self.records[name], **fields)
        unit = self._store.record(_key(name), Unit(asdict(record), seconds=record.seconds), again=True)
        self.records[name] = JobRecord(**unit.value)
        return self.records[name]

    def unsettled(self) -> list[str]:
        """Return the jobs that an earlier process left running, after waiting until none of their processes runs."""
        found = [name for name, record in self.records.items() if record.state == "running"]
        for name in found:
            with open_to_write(self.lock(name), _INSIDE) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        return found

    def lock(self, name: str) -> Path:
        """Return the file on which a job's processes hold a lock."""
        return self._store.path / "ends" / f"{name}.lock"

    def end_file(self, name: str) -> Path:
        """Return the file that says how the job's present attempt ended."""
        return self._store.path / "ends" / f"{name}.{self.records[name].attempt}.json"

    def log(self, name: str) -> Path:
        return self._store.path / "logs" / f"{name}.log"

    def call_file(self, name: str, suffix: str) -> Path:
        """Return the file of a function's pickle, or of its value in the present attempt."""
        return self._store.path / "calls" / f"{name}.{self.records[name].attempt}.{suffix}"

    def end(self, name: str) -> JobEnd | None:
        """Return how a job's present attempt ended; None if it did not end by itself."""
        file = self.end_file(name)
        return dict(json.loads(read_file(file, _INSIDE))) if file.exists() else None

    def value(self, name: str) -> Any:
        """Return the value of a function; None for a command. ValueError if the file of the value cannot be read."""
        file = self.call_file(name, "json")
        return json.loads(read_file(file, _INSIDE)) if file.exists() else None

    def forget_files(self, name: str) -> None:
        """Remove the files of an attempt, once the journal knows how it ended."""
        for file in (self.end_file(name), self.lock(name), *(self.call_file(name, s) for s in ("pickle", "json"))):
            file.unlink(missing_ok=True)

    def log_tail(self, name: str) -> str:
        """Return the last 4,000 bytes of a job's output."""
        file = self.log(name)
        if not file.exists():
            return ""
        with open_to_read(file, _INSIDE) as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - 4000))
            return opened.read().decode(errors="replace")


def _key(name: str) -> str:
    return f"job/{name}"
