"""The page of several runs side by side: which is better, and in what they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hydro_rasda.console import show
from hydro_rasda.page import words
from hydro_rasda.page.drawing import Section, drawing
from hydro_rasda.page.sections import asked_of
from hydro_rasda.plots.look import nothing
from hydro_rasda.plots.side_by_side import best_scores, costs, winners_curves
from hydro_rasda.results.comparison import compared, names_of, verdict
from hydro_rasda.results.records import RunRecord


def sections_of(records: Sequence[RunRecord]) -> Iterator[Section]:
    """Yield the sections of the page, from top to bottom."""
    asked, names = [asked_of(record) for record in records], names_of(records)
    told = compared(records, asked)
    decided = verdict(records, asked)
    if not decided.startswith(tuple(names)):
        decided = f"{decided[0].upper()}{decided[1:]}"
    yield Section("Answer", [f"{decided}."], table=_table(names, told["found"]))
    used = [words.configuration(record) for record in records]
    alike = {name: value for name, value in used[0].items() if all(each.get(name) == value for each in used)}
    rows = {name: [each.get(name, "") for each in used] for each in used for name in each if name not in alike}
    same = ["The same in all: " + ", ".join(f"{name}={value}" for name, value in alike.items()) + "."] if alike else []
    yield Section("Best configurations", same, table=_table(names, rows))
    spent = [words.cost_facts(record, each.get("max_t")) for record, each in zip(records, asked)]
    rows = {name: [each.get(name, "") for each in spent] for each in spent for name in each}
    yield Section("Cost", table=_table(names, rows), figures=[drawing(costs, records)])
    dotted = "Solid lines are full-size models, dotted ones surrogates."
    figures = [drawing(_comparable(best_scores), records, name="best-scores")]
    yield Section("Best score over time", [dotted], figures=figures)
    figures = [drawing(_comparable(winners_curves), records, name="winners-curves")]
    yield Section("Learning curves of the best trials", [dotted], figures=figures)
    differing = {**told["asked"], **told["code and data"]}
    yield Section("What was asked", [] if differing else ["The same of all."], table=_table(names, differing))


def _comparable(make: Callable[[Sequence[RunRecord]], Any]) -> Callable[[Sequence[RunRecord]], Any]:
    """Draw scores only if all are of one metric."""

    def drawn(records: Sequence[RunRecord]) -> Any:
        return make(records) if len({(r.metric, r.mode) for r in records}) == 1 else nothing("the metrics differ")

    return drawn


def _table(names: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    """A column for each run; nothing without rows."""
    told = [[name, *(show(value, 6) for value in values)] for name, values in rows.items()]
    return [["", *names], *told] if told else []
