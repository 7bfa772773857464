"""Output of the commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console

from hydro_rasda.common.console import duration, one_line, printable
from hydro_rasda.common.short_values import show
from hydro_rasda.history.lines import jsonable
from hydro_rasda.records.records import RunRecord, TrialRecord
from hydro_rasda.records.report import render


def print_json(value: Any) -> None:
    """Print strict JSON, in which NaN is null."""
    print(json.dumps(jsonable(value), indent=2))


def say(text: object, end: str = "\n", error: bool = False) -> None:
    """Print a text for people. `printable` makes its control characters visible."""
    print(printable(text), end=end, file=sys.stderr if error else sys.stdout)


def trial_values(trial: TrialRecord) -> dict[str, Any]:
    """Return the values of a trial for JSON, without its curves."""
    optional = ("costs", "live")
    return {name: value for name, value in vars(trial).items() if name != "history" and (value or name not in optional)}


def print_record(console: Console, record: RunRecord) -> None:
    """Print a run's best trials and its cost. Without a terminal, leave out horizontal lines and padding."""
    if console.is_terminal or console.is_jupyter:
        console.print(render(record))
        return
    with console.capture() as captured:
        console.print(render(record))
    for line in captured.get().splitlines():
        if line.strip(" ─"):
            say(line.rstrip())


def print_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, one line for each row, however long, so that programs can read it. Numbers are right-aligned."""
    headings, cells = [*map(one_line, headings)], [[*map(_cell, row)] for row in rows]
    columns = [*zip(*rows, strict=True)] or [() for _ in headings]
    right = [bool(column) and all(map(_numeric, column)) for column in columns]
    widths = [max(map(cell_len, column)) for column in zip(headings, *cells, strict=True)]
    for i, line in enumerate([headings, *cells]):
        text = "  ".join(map(_aligned, line, widths, right)).rstrip()
        typer.echo(text if i else typer.style(text, bold=True))  # without a terminal, echo drops the style


def _aligned(cell: str, width: int, right: bool) -> str:
    """Pad a cell to a width on the screen, where one character may be two columns wide."""
    gap = " " * (width - cell_len(cell))
    return gap + cell if right else cell + gap


def _numeric(value: Any) -> bool:
    return value is None or isinstance(value, (int, float))


def _cell(value: Any) -> str:
    return "" if value != value else one_line(show(value, 4))


def age(when: float) -> str:
    """Say how long ago a time was, given in seconds since 1970."""
    return f"{duration(max(0, round(time.time() - when)))} ago"


def size(count: int) -> str:
    """Write a number of bytes for people."""
    for unit, power in (("GB", 3), ("MB", 2), ("kB", 1)):
        if count >= 1000**power:
            return f"{show(count / 1000**power)} {unit}"
    return f"{count} bytes"
