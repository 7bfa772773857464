"""What a search ten times as large costs: each row of the table before and after the work on it.

    python -m benchmarks.scale [row ...] [--before]

Rows that are named are measured again, all of them by default; the others stay as they were measured. `--before`
writes the column of the code that a later one is compared with. Result files: `results/scale.json` and, as a table,
`scale.md`; then `python -m benchmarks.results_page` draws `RESULTS.md` again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks import scale_rows as measure
from benchmarks.result_files import environment, options, read, save, versions

FILE = "scale.json"
VERSIONS = versions("torch", "ray", "numpy")


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        measure: Gives numbers; `unit` is one of them.
        target: To reach; None where the number is only shown.
        earlier: Whether the column "before" is worth its time: what grows quadratically is left out where it is large.
    """

    what: str
    measure: Callable[[], measure.Numbers]
    unit: str
    target: float | None
    more: bool = False
    earlier: bool = True

    def met(self, number: float) -> bool | None:
        """Whether a number reaches the target; None where there is none."""
        if self.target is None:
            return None
        return number >= self.target if self.more else number <= self.target


_LARGE = partial(measure.simulator, 12_500, 25_000, repeats=1)
_READ = partial(measure.examples_read, 4, 1024)

ROWS = {
    "imports": Row("`from hydro_rasda import tune`, beyond `import torch`", measure.imports, "s of CPU", 0.3),
    "script": Row("the first program of the guides, from `python` to its end", measure.script, "s of CPU", None),
    "traces": Row("`tune`, 9 trials of a model without a width argument", partial(measure.traces, 9), "traces", 1),
    "dispatch": Row("the next groups of a device, 2,000 trials waiting", partial(measure.dispatch, 2000), "ms", 5),
    "scheduler": Row("`RASDAScheduler` alone, 400 trials", partial(measure.scheduler, 400), "s", 0.4),
    "scheduler_large": Row("... 10,000 trials", partial(measure.scheduler, 10_000), "s", 10, earlier=False),
    "resume": Row("8 of a group of 256 go on from its checkpoint", partial(measure.resume, 256, 8), "s", 0.5),
    "simulator": Row("simulator, 1,250 GPUs: an event", partial(measure.simulator, 1250, 2500), "us", 40),
    "simulator_large": Row("... 12,500 GPUs", _LARGE, "us", 40, earlier=False),
    "events": Row("... 256 GPUs: events", partial(measure.simulator, 256, 2000), "million a minute", 3, more=True),
    "examples_read": Row(
        "examples that 4 ranks read, over those of a Dataset", partial(measure.examples_read, 4, 1024), "times", 1
    ),
}


def measured(row: Row) -> dict[str, Any]:
    """A row's number, and when, on what and under which load it was measured."""
    before = environment()
    number = row.measure()[row.unit]
    return {"number": number} | {name: before[name] for name in ("date", "load", "cpu")}


def markdown(result: dict[str, Any]) -> str:
    """The result as a table, misses included."""
    machine = result["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [
        "# Ten times the size",
        "",
        f"{machine['cpu']}, where a row names no other, {machine['cores']} cores, Python {machine['python']}, "
        f"{versions}. Medians of a few runs, each with its date and the load average at its start: under load, times "
        "are longer than on a quiet machine, counts are not. *Before* is the code that the work on these rows began "
        "with, measured by the same functions "
        "(`benchmarks/scale_rows.py`). Rerun: `python -m benchmarks.scale [row ...]`.",
        "",
        "| row | what | before | now | to reach | | measured (load) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in ROWS.items():
        before, now = (result[column].get(name) for column in ("before", "now"))
        target = "" if row.target is None else f"{row.target:g} {row.unit}"
        verdict = {True: "met", False: "**missed**", None: ""}[row.met(now["number"]) if now else None]
        when = ", ".join(_when(cell, machine["cpu"]) for cell in (before, now) if cell)
        lines.append(
            f"| `{name}` | {row.what} | {shown(before, row)} | {shown(now, row)} | {target} | {verdict} | {when} |"
        )
    return "\n".join(lines) + "\n"


def _when(cell: dict[str, Any], cpu: str) -> str:
    elsewhere = "" if cell.get("cpu", cpu) == cpu else f", {cell['cpu']}"
    return f"{cell['date']} ({cell['load']}{elsewhere})"


def shown(cell: dict[str, Any] | None, row: Row) -> str:
    """A number with its unit; "-" where it was not measured."""
    if cell is None:
        return "-"
    number = cell["number"]
    return f"{number:,.0f} {row.unit}" if abs(number) >= 100 else f"{number:.3g} {row.unit}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result files."""
    parser = options(__doc__)
    parser.add_argument("rows", nargs="*", metavar="row", help=", ".join(ROWS))
    parser.add_argument("--before", action="store_true", help="write the column of the code before")
    given = parser.parse_args(arguments)
    unknown = set(given.rows) - ROWS.keys()
    if unknown:
        parser.error(f"`row` is {min(unknown)!r}, but must be one of {', '.join(ROWS)}")
    for name in given.rows or [name for name, row in ROWS.items() if row.earlier or not given.before]:
        cell = measured(ROWS[name])
        print(f"{name}: {shown(cell, ROWS[name])}   load {cell['load']}", flush=True)
        # Read anew for each row: a measurement beside this one may have written another.
        result = {"environment": environment(versions=VERSIONS), **read(given.out / FILE, {"before": {}, "now": {}})}
        result["before" if given.before else "now"][name] = cell
        save(given.out / FILE, result, markdown(result))


if __name__ == "__main__":
    main()
