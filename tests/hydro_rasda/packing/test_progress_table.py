"""What is shown while jobs run."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from hydro_rasda.packing import Device, JobRecord
from hydro_rasda.packing.pack import Progress

RECORDS = {name: JobRecord(name, state) for name, state in (("a", "complete"), ("b", "running"), ("c", "pending"))}  # type: ignore[arg-type]
DEVICES = [Device("gpu-0", 4 * 2**30), Device("gpu-1", 4 * 2**30)]
RUNNING: Any = [SimpleNamespace(device=DEVICES[0], task=SimpleNamespace(name="b"), now=2**30)]


def shown(terminal: bool, *seconds: float, silent: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, quiet=silent)
    with Progress(RECORDS, console, silent) as progress:
        for now in seconds:
            progress.show(RUNNING, DEVICES, now)
    return out.getvalue()


def test_off_a_terminal_there_is_a_line_a_minute_and_one_at_the_end() -> None:
    counts = "1 of 3 jobs complete, 1 running, 1 pending"
    lines = shown(False, 1, 61, 62, 122).splitlines()
    assert [line.startswith(counts) for line in lines] == [True] * 3
    assert lines[-1] == counts


def test_on_a_terminal_there_is_a_table() -> None:
    text = shown(True, 1)
    assert "gpu-0" in text
    assert "1.0 of 4.0" in text
    assert "0.0 of 4.0" in text


def test_a_silent_one_says_nothing() -> None:
    assert shown(True, 1, 61, silent=True) == ""
