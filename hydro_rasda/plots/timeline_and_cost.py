"""Figures of the time and cost of a run, and of the costs of several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydro_rasda.common.console import duration
from hydro_rasda.common.heat_names import HEAT_NAMES, HeatName
from hydro_rasda.common.short_values import counted
from hydro_rasda.plots.curves import COLORS
from hydro_rasda.plots.figure_style import (
    BEST,
    FAINT,
    Figure,
    escaped,
    figures_of,
    graph_objects,
    new_figure,
    nothing,
)
from hydro_rasda.records.comparison_of_runs import names_of
from hydro_rasda.records.records import RunRecord, by_heat
from hydro_rasda.records.report import both_units
from hydro_rasda.records.timeline import Training, busy_share, journal_of, trainings

BARS = 3_000
"""The most bars of the timeline. If there are more, the longest are drawn."""


def timeline(result: RunRecord) -> Figure:
    """Draw a bar over time for each fused group and full-size model. Each row of bars belongs to a device.

    Bars above each other trained at the same time. The number on a bar is the number of trials in its group. The label
    of a row has the share of time in which it was busy. If the journal names no devices, a row holds trainings that did
    not overlap.
    """
    found = trainings(journal_of(result))
    if not found:
        return nothing("nothing has been trained yet")
    go, rows = graph_objects(), _rows(found)
    drawn = sorted(found, key=lambda each: each.ended - each.began)[-BARS:]
    figure = new_figure(
        height=130 + 34 * len(rows),
        barmode="overlay",
        bargap=0.15,
        xaxis={"title": {"text": "seconds"}, "rangemode": "tozero"},
        yaxis={"automargin": True, "autorange": "reversed", "type": "category", "categoryarray": [*rows.values()]},
        uniformtext={"minsize": 9, "mode": "hide"},
    )
    figure.update_layout(yaxis={"categoryorder": "array"})
    count = dict.fromkeys(_COLORS, 0)
    for name, bars in sorted(_spans(drawn).items(), key=lambda span: min(bar.began for bar in span[1])):
        heat = bars[0].heat
        full = heat == "race"
        count[heat] += 1
        colors = _COLORS[heat]
        figure.add_trace(
            go.Bar(
                x=[figures_of(bar.ended - bar.began) for bar in bars],
                base=[figures_of(bar.began) for bar in bars],
                y=[rows[bar.device, bar.lane] for bar in bars],
                text=[f"trial {bar.trials[0]}" if full else str(len(bar.trials)) for bar in bars],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                constraintext="inside",
                customdata=[_told(bar) for bar in bars],
                hovertemplate="%{customdata}<extra></extra>",
                orientation="h",
                name=name,
                insidetextfont={"color": "#212529"},
                marker={"color": colors[min(count[heat], len(colors)) - 1], "line": {"width": 1, "color": "white"}},
            )
        )
    return figure


def _spans(found: Sequence[Training]) -> dict[str, list[Training]]:
    """Group trainings that get one color on the timeline: those of one heat that trained to the same epoch."""
    spans: dict[str, list[Training]] = {}
    for each in found:
        spans.setdefault(f"{each.heat} to epoch {each.stop}", []).append(each)
    return spans


_COLORS: Mapping[HeatName, Sequence[str]] = {
    "sweep": ("#a5d8ff", "#74c0fc", "#4dabf7", "#228be6", "#1864ab"),
    "middle": ("#eebefa", "#da77f2", "#be4bdb", "#9c36b5"),
    "race": ("#ffd8a8", "#ffc078", "#ffa94d", "#fd7e14", "#d9480f"),
}
"""The colors of the heats: darker for later epochs."""


def _told(bar: Training) -> str:
    trials = ", ".join(map(str, bar.trials[:12])) + (", ..." if len(bar.trials) > 12 else "")
    width = "full size" if bar.heat == "race" else f"{len(bar.trials)} as one" if len(bar.trials) > 1 else "alone"
    return f"trial{'s' if len(bar.trials) > 1 else ''} {trials} ({width})<br>epochs {bar.start + 1} to {bar.stop}" + (
        f"<br>{duration(bar.ended - bar.began)}"
    )


def _rows(found: Sequence[Training]) -> Mapping[tuple[int | None, int], str]:
    """Map each device and lane (a row of the device) to the name of the row, with the share of time it was busy."""
    rows: dict[tuple[int | None, int], list[Training]] = {}
    for each in found:
        rows.setdefault((each.device, each.lane), []).append(each)
    ordered = sorted(rows, key=lambda row: (row[0] is None, row[0] or 0, row[1]))
    several = len({device for device, _ in ordered}) > 1
    begin, end = min(each.began for each in found), max(each.ended for each in found)
    names = {}
    for device, lane in ordered:
        trained = rows[device, lane]
        whole = max(end - begin, 1e-9)
        own = max(each.ended for each in trained) - min(each.began for each in trained)
        place = f"device {device}, {lane + 1}" if several and device is not None else f"place {lane + 1}"
        names[device, lane] = f"{place}: {busy_share(trained) * own / whole:.0%} busy"
    return names


def cost(result: RunRecord) -> Figure:
    """Draw the wall time of the sweep, of full-size training, and of the rest, in seconds and in full trainings.

    A second bar estimates the time without surrogates, if the sweep trained one full-size trial after another.
    """
    spent = result.cost
    if spent.seconds <= 0:
        return nothing("nothing has been trained yet")
    heats = by_heat(spent)
    rest = max(0.0, spent.seconds - sum(seconds for _, seconds in heats.values()))
    parts = {f"{name}, {counted(epochs, 'epoch')}": (took, COLORS[name]) for name, (epochs, took) in heats.items()}
    parts["planning, checks, files"] = rest, FAINT
    figure = new_figure(height=340, barmode="stack", xaxis={"title": {"text": "seconds"}})
    figure.update_layout(yaxis={"automargin": True, "autorange": "reversed"})

    def bar(row: str, seconds: float, name: str, color: str, legend: bool = True) -> object:
        told = f"{name}:<br>{both_units(result, seconds)}"  # two lines, to fit the narrow screen of a phone
        return graph_objects().Bar(
            x=[figures_of(seconds)],
            y=[row],
            orientation="h",
            name=told,
            showlegend=legend,
            marker={"color": color},
            hovertemplate=f"{told}<extra></extra>",
        )

    for name, (seconds, color) in parts.items():
        figure.add_trace(bar("this run", seconds, name, color))
    if spent.spared_seconds > 0:
        row, instead = "without<br>surrogates", spent.spared_seconds + spent.sweep_seconds
        figure.add_trace(bar(row, instead, "sweep at full size (estimate)", "rgba(28, 126, 214, 0.3)"))
        figure.add_trace(bar(row, spent.race_seconds, "race", BEST, legend=False))
    return figure


def costs(records: Sequence[RunRecord]) -> Figure:
    """Draw the wall time of each run as a bar, divided into surrogates, full size, and the rest."""
    if not any(record.cost.seconds > 0 for record in records):
        return nothing("nothing has been trained yet")
    rows = [escaped(name) for name in names_of(records)]
    figure = new_figure(height=130 + 40 * len(rows), barmode="stack", xaxis={"title": {"text": "seconds"}})
    figure.update_layout(yaxis={"automargin": True, "autorange": "reversed", "type": "category", "categoryarray": rows})
    spent = [{heat: seconds for heat, (_, seconds) in by_heat(record.cost).items()} for record in records]
    rest = [max(0.0, record.cost.seconds - sum(of_heats.values())) for record, of_heats in zip(records, spent)]
    heats = [heat for heat in HEAT_NAMES if any(heat in of_heats for of_heats in spent)]
    parts = {str(heat): ([of_heats.get(heat, 0.0) for of_heats in spent], COLORS[heat]) for heat in heats}
    parts["planning, checks, files"] = rest, FAINT
    for name, (seconds, color) in parts.items():
        told = [both_units(r, each) for r, each in zip(records, seconds)]
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
