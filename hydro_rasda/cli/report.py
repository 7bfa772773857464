"""`report` and `compare`: one run, or several beside each other, as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydro_rasda.checks import require
from hydro_rasda.cli.output import print_json, print_table, say
from hydro_rasda.results.comparison import compared, names_of, verdict
from hydro_rasda.results.reading import read_record
from hydro_rasda.run.spec import read_asked

PAGE = "report.html"


def write_report(path: str, out: str | None, as_json: bool) -> None:
    """Write the page, and print its path."""
    from hydro_rasda.page import write_page  # which waits for NumPy

    record = read_record(path)
    file = write_page([record], record.path / PAGE if out is None else Path(out))
    if as_json:
        print_json({"path": str(file), "bytes": file.stat().st_size})
    else:
        say(file)


def compare_runs(paths: Sequence[str], as_json: bool, out: str | None = None) -> None:
    """Print runs beside each other, and write them as a page."""
    require(len(paths) > 1, "PATH", " ".join(paths), "the folders of two runs or more")
    records = [read_record(path) for path in paths]
    asked = [read_asked(Path(path).expanduser()) for path in paths]
    told, decided = compared(records, asked), verdict(records, asked)
    file = None
    if out is not None:
        from hydro_rasda.page import write_page  # likewise

        file = write_page(records, Path(out))
    if as_json:
        wrote = {} if file is None else {"page": str(file)}
        print_json({"runs": [str(record.path) for record in records], **told, "verdict": decided, **wrote})
        return
    rows = [[section, name, *values] for section, named in told.items() for name, values in named.items()]
    again = [i > 0 and rows[i - 1][0] == section for i, (section, *_) in enumerate(rows)]
    shown = [["" if same else each[0], *map(_short, each[1:])] for each, same in zip(rows, again, strict=True)]
    print_table(["", "", *names_of(records)], shown)
    say(decided)
    if file is not None:
        say(file)


def _short(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float)) else str(value)
