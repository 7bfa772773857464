"""Rows and cells of the comparison in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.vs_asha.statistics import Cell, MethodRow, Spread


def how_often(row: MethodRow) -> str:
    """Say in how many runs the baseline's score was reached, such as "2 of 5"; "" without a baseline."""
    return f"{row.reached} of {row.compared}" if row.compared else ""


def show(value: Spread | None, unit: str = "") -> str:
    """Return the median and the quartiles as text, or only the median if all are equal.

    >>> show(Spread(2.5, 2.0, math.inf), "x"), show(Spread(3.0, 3.0, 3.0)), show(None)
    ('2.50x [2.00, never]', '3.00', '')
    """
    if value is None:
        return ""
    median, low, high = (_number(part) for part in value)
    return median + unit * (median != "never") + (f" [{low}, {high}]" if (low, high) != (median, median) else "")


def _number(value: float) -> str:
    if math.isinf(value):
        return "never"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) > 9 else f"{value:#.3g}"


def machine(cells: Sequence[Cell]) -> str:
    """Describe the hardware and dates of some cells, each variant once, and how much other work ran there."""
    where = [cell["environment"] for cell in cells]
    dates = _each([{"date": one["date"][:10]} for one in where], "date")
    others = max(one["busy before"] for one in where)
    gpus = "".join(f", {name}" for name in sorted({one["gpu"] for one in where if "gpu" in one}))
    alone = ", one of them for cells alone" * any(one.get("cores of its own") == 1 for one in where)
    return (
        f"{_each(where, 'cpu')}, {_each(where, 'cores')} cores{alone}{gpus}; {dates}. "
        f"Other work took at most {others:.0%} of the cores before a cell"
    )


def versions(cells: Sequence[Cell]) -> str:
    """Describe the versions and threads with which some cells were run."""
    where = [cell["environment"] for cell in cells]
    python, torch, ray, threads = (_each(where, name) for name in ("python", "torch", "ray", "threads"))
    return f"Python {python}, torch {torch} on {threads} thread{'s' * (threads != '1')}, Ray {ray}"


def _each(where: Sequence[Mapping[str, Any]], name: str) -> str:
    return " and ".join(sorted({str(one[name]) for one in where}))


def domains(space: Mapping[str, Any]) -> str:
    """Return a search space, in the form that cells have, as text."""
    return ", ".join(f"{name} {domain}" for name, domain in space.items())
