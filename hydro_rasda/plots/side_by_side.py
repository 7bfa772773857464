"""Figures of several runs beside each other: a colour for each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydro_rasda.plots.curves import STAGES, ends_of, points
from hydro_rasda.plots.look import (
    BEST,
    FAINT,
    FINALISTS,
    Figure,
    escaped,
    figures_of,
    graph_objects,
    new_figure,
    nothing,
    score_axis,
)
from hydro_rasda.plots.spending import both_units, full_epochs
from hydro_rasda.results.comparison import names_of
from hydro_rasda.results.records import RunRecord
from hydro_rasda.results.timeline import best_over_time as bests
from hydro_rasda.results.timeline import journal_of
from hydro_rasda.run.events import Stage

_LINES: dict[Stage, dict[str, Any]] = {
    "surrogate": {"dash": "dot", "width": 1.5},
    "target": {"dash": "solid", "width": 2.5},
}


def _line(run: int, stage: Stage) -> dict[str, Any]:
    return {**_LINES[stage], "color": FINALISTS[run % len(FINALISTS)]}


def best_scores(records: Sequence[RunRecord]) -> Figure:
    """Draw the best score so far of each run against its wall time, dotted for surrogates."""
    go, figure = graph_objects(), new_figure(xaxis={"title": {"text": "seconds"}, "rangemode": "tozero"})
    values = []
    for i, (record, name) in enumerate(zip(records, names_of(records))):
        units = journal_of(record)
        found = bests(units, record)
        for stage, title in STAGES:
            if not (steps := found.get(stage)):
                continue
            values += [step.score for step in steps]
            figure.add_trace(
                go.Scatter(
                    **points(steps, ends_of(units)[stage]),
                    name=escaped(f"{name}, {title}"),
                    mode="lines",
                    line={"shape": "hv", **_line(i, stage)},
                    hovertemplate=f"{escaped(name)}: %{{y}} after %{{x}} s<br>%{{text}}<extra></extra>",
                )
            )
    if not values:
        return nothing("no trial has a score yet")
    return figure.update_yaxes(score_axis(values, records[0].mode, records[0].metric))


def winners_curves(records: Sequence[RunRecord]) -> Figure:
    """Draw the learning curve of each run's best trial, dotted for its surrogate."""
    go, figure = graph_objects(), new_figure(xaxis={"title": {"text": "epoch"}})
    values = []
    for i, (record, name) in enumerate(zip(records, names_of(records))):
        best = record.trials[record.best_trial] if record.trials else None
        for stage, title in STAGES:
            lines = [line for line in (best.history if best else ()) if line["stage"] == stage]
            if best is None or not (lines := [line for line in lines if line.get(record.metric) is not None]):
                continue
            scores = [figures_of(line[record.metric]) for line in lines]
            values += scores
            told = f"{escaped(name)}, trial {best.trial}, {title}"
            figure.add_trace(
                go.Scatter(
                    x=[line["epoch"] for line in lines],
                    y=scores,
                    name=told,
                    mode="lines",
                    line=_line(i, stage),
                    hovertemplate=f"{told}<br>epoch %{{x}}: %{{y}}<extra></extra>",
                )
            )
    if not values:
        return nothing("no trial has a score yet")
    return figure.update_yaxes(score_axis(values, records[0].mode, records[0].metric))


def costs(records: Sequence[RunRecord]) -> Figure:
    """Draw the wall time of each run as a bar: surrogates, full size, and the rest."""
    if not any(record.cost.seconds > 0 for record in records):
        return nothing("nothing has been trained yet")
    rows = [escaped(name) for name in names_of(records)]
    figure = new_figure(height=130 + 40 * len(rows), barmode="stack", xaxis={"title": {"text": "seconds"}})
    figure.update_layout(yaxis={"automargin": True, "autorange": "reversed", "type": "category", "categoryarray": rows})
    spent = [record.cost for record in records]
    rest = [max(0.0, cost.seconds - cost.surrogate_seconds - cost.target_seconds) for cost in spent]
    parts = {
        "surrogates": ([cost.surrogate_seconds for cost in spent], FINALISTS[0]),
        "full size": ([cost.target_seconds for cost in spent], BEST),
        "planning, checks, files": (rest, FAINT),
    }
    for name, (seconds, color) in parts.items():
        told = [both_units(cost, each, full_epochs(r)) for cost, each, r in zip(spent, seconds, records)]
        figure.add_trace(
            graph_objects().Bar(
                x=[*map(figures_of, seconds)],
                y=rows,
                customdata=told,
                orientation="h",
                name=name,
                marker={"color": color},
                hovertemplate=f"%{{y}}, {name}: %{{customdata}}<extra></extra>",
            )
        )
    return figure
