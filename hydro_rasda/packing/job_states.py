"""The states of all jobs, and their journal.

A change is in the journal before it takes effect: a job is "running" there before it is started, so that none can run
unseen. After a process was killed, its jobs are settled when the grid is opened again: a job that ended meanwhile has
ended, and one that did not waits again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydro_rasda.checks import require
from hydro_rasda.packing.records import JobRecord
from hydro_rasda.packing.tasks import Task
from hydro_rasda.run.files import open_to_read, open_to_write, read_file, refuse_links, refuse_open_to_others
from hydro_rasda.run.journal import Unit
from hydro_rasda.run.store import Store

End = Mapping[str, float]
"""How a job ended: its "exit" status, "seconds", "cpu" seconds, and "memory" of the largest of its processes."""

_JOBS = "jobs"

_INSIDE = 2
"""Levels below the run's folder at which the files of jobs lie."""


class Grid:
    """All jobs of a run.

    Args:
        tasks: All that are asked for. The first must be those that the run has so far; more may follow them.
        retry_failed: True if what failed before waits again.

    Attributes:
        records: By name, where each stands.

    Raises:
        ValueError: if a job is another than the one of its name in the run so far.
        Unsafe: if others can write to the run's folder, or a link in it leads elsewhere.
    """

    def __init__(self, store: Store, tasks: Sequence[Task], retry_failed: bool = False) -> None:
        self._store = store
        self.tasks = {task.name: task for task in tasks}
        asked = {task.name: task.what for task in tasks}
        before = store.units()[_JOBS].value if store.done(_JOBS) else {}
        for name, what in before.items():
            rule = f"{what}, as in the run so far in {store.path}"
            require(asked.get(name) == what, f"jobs[{name!r}]", asked.get(name), rule)
        if asked != before:
            store.record(_JOBS, Unit(asked), again=True)
        units = store.units()
        known = {name: JobRecord(**units[key].value) for name in asked if (key := _key(name)) in units}
        self.records = {name: known.get(name, JobRecord(name)) for name in asked}
        # Functions lie there pickled.
        refuse_open_to_others(store.path)
        for folder in ("ends", "logs", "calls"):
            refuse_links(store.path / folder)
            (store.path / folder).mkdir(exist_ok=True)
        if retry_failed:
            for record in list(self.records.values()):
                if record.state == "failed":
                    self.change(record.name, state="pending", error="", exit=None)

    def change(self, name: str, **fields: Any) -> JobRecord:
        """A job stands otherwise from now on, also after whatever happens to this process."""
        record = replace(self.records[name], **fields)
        unit = self._store.record(_key(name), Unit(record.as_json(), seconds=record.seconds), again=True)
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

    def end(self, name: str) -> End | None:
        """How a job's present attempt ended; None where it did not end by itself."""
        file = self.end_file(name)
        return dict(json.loads(read_file(file, _INSIDE))) if file.exists() else None

    def value(self, name: str) -> Any:
        """Return the value of a function; None for a command."""
        file = self.call_file(name, "json")
        return json.loads(read_file(file, _INSIDE)) if file.exists() else None

    def forget_files(self, name: str) -> None:
        """Once the journal knows how a job ended."""
        for file in (self.end_file(name), self.lock(name), *(self.call_file(name, s) for s in ("pickle", "json"))):
            file.unlink(missing_ok=True)

    def log_tail(self, name: str, characters: int = 4000) -> str:
        """The end of what a job wrote."""
        file = self.log(name)
        if not file.exists():
            return ""
        with open_to_read(file, _INSIDE) as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - characters))
            return opened.read().decode(errors="replace")


def _key(name: str) -> str:
    return f"job/{name}"
