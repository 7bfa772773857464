"""The progress of jobs: a table on a terminal, else a line a minute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from types import TracebackType

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hydro_rasda.console import LINE_SECONDS, duration, make_console
from hydro_rasda.packing.devices import Device
from hydro_rasda.packing.job_process import Process
from hydro_rasda.packing.records import JobRecord

_GIB = 2.0**30


class Progress:
    """Shows where jobs stand.

    Args:
        records: By name, as they stand whenever something is shown.
        silent: True to show nothing.
    """

    def __init__(self, records: Mapping[str, JobRecord], console: Console | None = None, silent: bool = False) -> None:
        self._records = records
        self._console = console or make_console(quiet=silent)
        live = self._console.is_terminal and not silent
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if live else None
        self._said = 0.0

    def show(self, running: Collection[Process], devices: Collection[Device], seconds: float) -> None:
        """Show the states of all jobs after so many seconds; off a terminal, at most once a minute."""
        line = f"{_counts(self._records)} after {duration(seconds)}"
        if self._live is not None:
            self._live.update(Group(Text(line), _table(running, devices)), refresh=True)
        elif seconds - self._said >= LINE_SECONDS:
            self._console.print(line)
            self._said = seconds

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._console.print(_counts(self._records))


def _counts(records: Mapping[str, JobRecord]) -> str:
    counts = Counter(record.state for record in records.values())
    parts = [f"{counts[state]} {state}" for state in ("running", "pending", "failed") if counts[state]]
    return ", ".join([f"{counts['complete']} of {len(records)} jobs complete", *parts])


def _table(running: Collection[Process], devices: Collection[Device]) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("device", no_wrap=True)
    table.add_column("jobs", overflow="fold")
    table.add_column("GiB in use", justify="right", no_wrap=True)
    for device in devices:
        there = [process for process in running if process.device.name == device.name]
        used = sum(process.now for process in there)
        names = " ".join(process.task.name for process in there)
        table.add_row(device.name, Text(names), f"{used / _GIB:.1f} of {device.memory / _GIB:.1f}")
    return table
