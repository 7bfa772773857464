"""`report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path

from hydro_rasda.cli.output import print_json, say
from hydro_rasda.page import write_page
from hydro_rasda.results.reading import read_record

PAGE = "report.html"


def write_report(path: str, out: str | None, as_json: bool) -> None:
    """Write the page, and print its path."""
    record = read_record(path)
    file = write_page([record], record.path / PAGE if out is None else Path(out))
    if as_json:
        print_json({"path": str(file), "bytes": file.stat().st_size})
    else:
        say(file)
