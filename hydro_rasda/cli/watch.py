"""`watch`: follow a running run through its journal alone, from another terminal or machine.

`watch` may start before the run, during it or after it. The run does not notice it.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from hydro_rasda.cli.output import age, print_record
from hydro_rasda.cli.runs import row_of, written
from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.console import LINE_SECONDS, make_console
from hydro_rasda.history.lines import jsonable
from hydro_rasda.records.record_from_journal import Follower, Stamp, runs_in, stamp
from hydro_rasda.records.records import RunRecord
from hydro_rasda.records.report import (
    best_line,
    explained,
    failed_and_diverged,
    live_line,
    live_trials,
    progress_of,
    render,
    rung_lines,
    rungs,
    state_of,
)
from hydro_rasda.run.claim import shows_locks
from hydro_rasda.run.run_json import SPEC

LOOK_SECONDS = 1.0
"""Seconds between two looks at a journal. If reading it takes long, the pause is longer, to keep no core busy."""

_SHARE = 10

IDLE_SECONDS = 30.0
"""`watch` ends if no process works on the run and its journal has not changed for this many seconds."""


@dataclass(frozen=True)
class Clock:
    """The functions for time and sleep, which tests replace."""

    now: Callable[[], float] = time.monotonic
    today: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def watch_run(path: str, as_json: bool, clock: Clock | None = None, wait: bool = False) -> bool:
    """Show a run until nothing trains any more, as a live table on a terminal, and in lines otherwise.

    If `wait` is True, keep waiting for a run that was interrupted, or on which another machine works. If it is False,
    return in these cases. Return True if the run came to its end, False if it was interrupted.
    """
    folder, clock = Path(path).expanduser().absolute(), clock or Clock()
    several = not (folder / SPEC).exists() and any(runs_in(folder))
    require(not several, "path", path, "the folder of one run: it holds several")
    console = make_console()
    seen: list[RunRecord] = []
    looks = _looks(folder, clock, wait, seen)
    if as_json:
        before = None
        for record in looks:
            if record is not None and (told := _values(record)) != before:
                print(json.dumps(told), flush=True)
                before = told
    elif console.is_interactive:
        _show_live(looks, folder, console)
    else:
        _print_lines(looks, folder, console, clock)
    if (ended := bool(seen and seen[-1].ended)) or as_json:
        return ended
    how = f"to wait all the same: hydro-rasda watch {shlex.quote(path)} --wait"
    console.print(f"{explained('interrupted')} ({how})", markup=False, soft_wrap=True)
    return False


def _values(record: RunRecord) -> dict[str, Any]:
    """Return the plain values of `row_of`, with the run's rungs and the last epoch of each trial that trains."""
    live = [{"trial": trial.trial, "of": record.max_t, **trial.live[-1]} for trial in live_trials(record)]
    values: dict[str, Any] = jsonable({**row_of(record), "rungs": rungs(record), "live": live})
    return values


def _looks(folder: Path, clock: Clock, wait: bool, last: list[RunRecord]) -> Iterator[RunRecord | None]:
    """Yield the latest record of the run at each look; None before the run begins.

    The looks end when the run is over or, unless `wait` is True, when it is abandoned. The list `last` always
    holds the latest record, if there is one.
    """
    record: RunRecord | None = None
    seen, follower = None, Follower(folder)
    while record is None or not record.ended:
        began = clock.now()
        if (stamp := _stamp(folder)) != seen:
            record, seen = follower.read(), stamp
        took = clock.now() - began
        last[:] = [] if record is None else [record]
        yield record
        if record is not None and not wait and _is_abandoned(record, clock):
            return
        if record is None or not record.ended:
            clock.sleep(max(LOOK_SECONDS, _SHARE * took))


def _is_abandoned(record: RunRecord, clock: Clock) -> bool:
    """Tell whether no process on this machine works on a run that has been idle for `IDLE_SECONDS`.

    Return False if the system cannot tell which process holds the lock of a run.
    """
    idle = clock.today() - written(record)
    return shows_locks() and state_of(record) == "interrupted" and idle >= IDLE_SECONDS


def _stamp(folder: Path) -> Stamp | None:
    return stamp(folder) if (folder / SPEC).is_file() else None


def _print_lines(looks: Iterator[RunRecord | None], folder: Path, console: Console, clock: Clock) -> None:
    """Print a line when there is something new, at most one in a minute; in the end, print the table."""
    said, at = "", -LINE_SECONDS
    for record in looks:
        line = _line(record, folder)
        if record is not None and record.ended:
            print_record(console, record)
        elif line != said and clock.now() - at >= LINE_SECONDS:
            console.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, soft_wrap=True)
            said, at = line, clock.now()


def _line(record: RunRecord | None, folder: Path) -> str:
    if record is None:
        return f"waiting for a run in {folder}"
    parts = (state_of(record), _progress(record), *rung_lines(record), live_line(record), best_line(record))
    parts = (*parts, failed_and_diverged(record))
    return "; ".join(part for part in parts if part)


def _progress(record: RunRecord) -> str:
    return "" if record.ended else progress_of(record, time.time() - written(record))


def _show_live(looks: Iterator[RunRecord | None], folder: Path, console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        for record in looks:
            live.update(_screen(record, folder), refresh=True)


def _screen(record: RunRecord | None, folder: Path) -> RenderableType:
    if record is None:
        return Text(f"waiting for a run in {folder} (Ctrl-C ends)")
    state = state_of(record)
    lines = [Text(f"{record.path.name}: {state}", style="bold")]
    if not record.ended:
        done = f", {told}" if (told := _progress(record)) else ""
        lines[0].append(f"{done}, last written {age(written(record))}", style="not bold")
    if state == "interrupted":
        lines.append(Text(explained(state)))
    trained = rung_lines(record)
    lines += map(Text, (*trained, *filter(None, [best_line(record)])))
    return Group(*lines, *([render(record)] if trained else []))
