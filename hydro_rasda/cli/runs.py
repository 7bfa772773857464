"""The commands `runs`, `show`, `report` and `compare`, which print and draw one run or several."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hydro_rasda.cli.output import age, print_json, print_record, print_table, say, trial_values
from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.console import duration, make_console
from hydro_rasda.common.short_values import show
from hydro_rasda.records.comparison_of_runs import compared, names_of, verdict
from hydro_rasda.records.record_from_journal import Unreadable, or_why, read_record, runs_in, stamp
from hydro_rasda.records.records import RunRecord
from hydro_rasda.records.report import best_score, explained, failure_lines, progress_of, sampling_line, state_of
from hydro_rasda.run.run_json import read_asked

_BAD = "not readable"

SAID = 8
"""The most messages of a run that are shown. If there are more, the last ones are shown."""

FAILED = 8
"""The most kinds of errors that are shown, each with the number of its trials."""


def written(record: RunRecord) -> float:
    """Return when a run's journal, or else its `run.json`, was last written, in seconds since 1970."""
    return stamp(record.path)[1] / 1e9


def list_runs(folder: str, json: bool) -> None:
    """Print the runs directly below a folder; if the folder is a run itself, print that run."""
    root = Path(folder).expanduser()
    require(root.is_dir(), "DIR", folder, "a folder: a `storage_path` of `tune`")
    rows = [_row_or_why(path) for path in runs_in(root)]
    rows.sort(key=lambda row: -row["written"])
    if json:
        print_json(rows)
    elif not rows:
        say(f"no run in {folder}")
    else:
        columns = {name: name for name in ("name", "state", "progress", "trials", "failed", "metric", "best")}
        columns |= {"seconds": "took", "written": "written"}
        columns |= {"error": "why"} if any("error" in row for row in rows) else {}
        print_table([*columns.values()], [[_told(name, row) for name in columns] for row in rows])
        if any(row["state"] == "interrupted" for row in rows):
            say(explained("interrupted"))


def row_of(record: RunRecord) -> dict[str, Any]:
    """Return a few plain values that summarize a run, for its row in the list of runs and for JSON."""
    score, heat = best_score(record)
    return {
        "name": record.path.name,
        "state": state_of(record),
        "seconds_left": record.seconds_left,
        "trials": len(record.trials),
        "failed": sum(trial.status == "failed" for trial in record.trials),
        "metric": f"{record.metric} ({record.mode})",
        "best": score,
        "best_heat": heat,
        "best_trial": record.best_trial if record.trials else None,
        "seconds": record.cost.seconds,
        "written": written(record),
        "path": str(record.path),
    }


def _row_or_why(path: Path) -> dict[str, Any]:
    found = or_why(partial(_listed, path))
    return (
        {"name": path.name, "state": _BAD, "written": 0.0, "error": found} if isinstance(found, Unreadable) else found
    )


def _listed(path: Path) -> dict[str, Any]:
    record = read_record(path)
    return {**row_of(record), "progress": progress_of(record, time.time() - written(record))}


def _told(name: str, row: Mapping[str, Any]) -> Any:
    value = row.get(name)
    if name == "best" and row.get("best_heat") in ("sweep", "middle"):
        return f"{show(value, 4)} ({row['best_heat']})"
    if name == "seconds" and value is not None:
        return duration(value)
    if name == "written":
        return age(value) if value else None
    return value


def show_run(path: str, json: bool) -> None:
    """Print a run's trials, cost, errors and last messages."""
    record = read_record(path)
    if json:
        values = {name: value for name, value in vars(record).items() if not name.startswith("_")}
        trials = [trial_values(trial) for trial in record.trials]
        transfer = asdict(record.transfer) if record.transfer else None
        cost = asdict(record.cost)
        more: dict[str, Any] = {"path": str(record.path), "state": state_of(record), "trials": trials, "cost": cost}
        agreement = asdict(record.agreement) if record.agreement else None
        said = [message._asdict() for message in record.messages]
        if record.others:
            more["objectives"] = dict(record.comparison.objectives)
            more["pareto"] = [trial.trial for trial in record.pareto]
        print_json(values | more | {"transfer": transfer, "agreement": agreement, "messages": said})
        return
    console = make_console()
    if record.trials:
        print_record(console, record)
    else:
        say("no trial has begun")
    lines = failure_lines(record)
    for line in lines[:FAILED]:
        console.print(line, markup=False)
    if len(lines) > FAILED:
        others = f"hydro-rasda trials {shlex.quote(path)} -w status=failed --json"
        console.print(f"{len(lines) - FAILED} other errors: {others}", markup=False, soft_wrap=True)
    shown = sampling_line(record)  # a message that `print_record` has already printed below the table
    for message in [message for message in record.messages if message.text not in shown][-SAID:]:
        console.print(f"{duration(message.seconds)}: {message.text}", markup=False, highlight=False)
    if not record.finished:
        console.print(f"{explained(state_of(record))}; this is what there is so far", markup=False)


PAGE = "report.html"


def write_report(path: str, out: str | None, as_json: bool) -> None:
    """Write a run as an HTML page, and print the path of the page."""
    from hydro_rasda.plots.page import write_page  # imported only here, because it imports NumPy

    record = read_record(path)
    file = write_page([record], record.path / PAGE if out is None else Path(out))
    if as_json:
        print_json({"path": str(file), "bytes": file.stat().st_size})
    else:
        say(file)


def compare_runs(paths: Sequence[str], as_json: bool, out: str | None = None) -> None:
    """Print runs side by side. If `out` is given, also write them there as a page."""
    require(len(paths) > 1, "PATH", " ".join(paths), "the folders of two runs or more")
    records = [read_record(path) for path in paths]
    asked = [read_asked(Path(path).expanduser()) for path in paths]
    told, decided = compared(records, asked), verdict(records, asked)
    file = None
    if out is not None:
        from hydro_rasda.plots.page import write_page  # imported only here, because it imports NumPy

        file = write_page(records, Path(out))
    if as_json:
        wrote = {} if file is None else {"page": str(file)}
        print_json({"runs": [str(record.path) for record in records], **told, "verdict": decided, **wrote})
        return
    rows = [[section, name, *values] for section, named in told.items() for name, values in named.items()]
    again = [i > 0 and rows[i - 1][0] == section for i, (section, *_) in enumerate(rows)]
    shown = [["" if same else each[0], *each[1:]] for each, same in zip(rows, again, strict=True)]
    print_table(["", "", *names_of(records)], shown)
    say(decided)
    if file is not None:
        say(file)
