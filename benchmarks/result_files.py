"""Options, environment, tables and result files, shared by all benchmarks.

A benchmark `x` has `results/x.json`, and `results/x.md` drawn from it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
DATA_VARIABLE = "HYDRO_RASDA_DATA"
DEFAULT_DATA = os.environ.get(DATA_VARIABLE, "../shared/data")

Row = dict[str, Any]


def options(doc: str | None, *, data: bool = False) -> argparse.ArgumentParser:
    """Make a parser with the benchmark's docstring as its help, `--out` and, if `data` is True, `--data`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    if data:
        parser.add_argument("--data", type=Path, default=Path(DEFAULT_DATA), help="folder of the data sets")
    return parser


def environment(*packages: str, **more: Any) -> Row:
    """Return hardware, date, load and versions, and `more` facts with which readers can judge or repeat the numbers."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **versions(*packages),
        **more,
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the version of each package."""
    return {package: version(package) for package in packages}


def cpu_model() -> str:
    """Return the processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def read(path: Path, otherwise: Any = None) -> Any:
    """Return the content of a result file, or `otherwise` if there is none."""
    return json.loads(path.read_text()) if path.exists() else otherwise


def save(path: Path, result: Any, page: str) -> None:
    """Write a result file, and its page beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(page)


def save_lines(path: Path, result: Row, many: str) -> None:
    """Write a result file, with a line for each entry of the list `result[many]`. It is written whole or not at all."""
    lines = ",\n  ".join(json.dumps(entry) for entry in result[many])
    head = json.dumps({name: value for name, value in result.items() if name != many}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(f'{head[:-2]},\n "{many}": [\n  {lines}\n ]\n}}\n')
    partial.replace(path)


def texts(page: str) -> dict[str, str]:
    """Return the texts of a page by name. In `pages/PAGE.txt`, each text stands below its name in brackets."""
    parts = re.split(r"^\[(.+)\]\n", (Path(__file__).parent / "pages" / f"{page}.txt").read_text(), flags=re.M)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2])}


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with a line for each row. The names of the first row's entries are the columns."""
    names = list(rows[0])
    return columns([name.replace("_", " ") for name in names], ([row[name] for name in names] for row in rows))


def columns(names: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table with these columns."""
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value)


def spread(values: Sequence[float], how: str = ".2f") -> str:
    """Return the median, the least and the most of some values as text."""
    return f"{median(values):{how}} [{min(values):{how}}, {max(values):{how}}]"
