"""A question of the page of results with the table that answers it, and functions that all answers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result_files import read

NOT_RUN = "not run"


class Answer(NamedTuple):
    """A question, and the table that answers it.

    Attributes:
        meaning: The meaning of the table for a user, in a sentence.
        columns: Names of the columns.
        rows: Cells as the page shows them, the best row first.
        sources: Pages of the folder of results.
        where: Machines and dates.
    """

    question: str
    meaning: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    sources: Sequence[str]
    where: str = ""


def machine_of(environment: dict[str, Any]) -> str:
    """Return the hardware and the date of a result file."""
    hardware = environment.get("machine") or f"{environment['cpu']}, {environment['cores']} cores"
    return f"{hardware}; {environment['date'][:10]}"


def machines_of(environments: Iterable[dict[str, Any]]) -> str:
    """Return the hardware of several results, each kind once, and the first and the last of their dates."""
    hardware, days = dict[str, dict[str, None]](), set[str]()
    for one in environments:
        size = f"{one['cores']} cores" + (f", {one['gpu']}" if "gpu" in one else "")
        hardware.setdefault(size, {}).setdefault(one["cpu"])
        days.add(one["date"][:10])
    machines = "; ".join(f"{' or '.join(cpus)}, {size}" for size, cpus in hardware.items())
    first, last = min(days), max(days)
    return f"{machines}; {first}" + f" to {last}" * (last != first)


def settled(*studies: str) -> Callable[[Path], list[Answer]]:
    """Return a function that reads the answers of finished studies. Their pages name the commit of their script."""

    def answers(folder: Path) -> list[Answer]:
        found = read(folder / "settled.json", {})
        return [Answer(**found[study]) for study in studies if study in found]

    return answers
