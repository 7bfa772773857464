"""Figures of scores over time, of one run and of several side by side: the best score so far, and learning curves.

A heat is a part of a run: the sweep, the middle heat or the race.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hydro_rasda.common.heat_names import HEAT_NAMES, HeatName
from hydro_rasda.common.short_values import counted, show
from hydro_rasda.plots.figure_style import (
    BAD,
    BEST,
    FAINT,
    FINALISTS,
    Figure,
    broken_line,
    describe,
    escaped,
    figures_of,
    graph_objects,
    new_figure,
    nothing,
    score_axis,
)
from hydro_rasda.records.comparison_of_runs import names_of
from hydro_rasda.records.records import RunRecord, TrialRecord, in_heat
from hydro_rasda.records.report import best_first
from hydro_rasda.records.timeline import best_over_time as bests
from hydro_rasda.records.timeline import journal_of
from hydro_rasda.settings.config import Mode

MANY = 60
"""The most curves of a heat that are drawn one by one; a heat with more curves is drawn as quantiles."""

BANDS = ((10, 90), (25, 75))
"""The lower and upper percentile of each band, the widest band first."""

COLORS: Mapping[HeatName, str] = {"sweep": FINALISTS[0], "middle": FINALISTS[2], "race": BEST}
"""Colors of the heats in figures of a whole run."""


def best_over_time(result: RunRecord) -> Figure:
    """Draw the best score so far against the wall time of the run, on surrogates and at full size.

    The line of a heat ends with its last epoch; the line of full-size models ends with the run.
    """
    go, values = graph_objects(), list[float]()
    figure = new_figure(xaxis={"title": {"text": "seconds"}, "rangemode": "tozero"})
    for heat, points in best_lines(result):
        values += points["y"]
        figure.add_trace(
            go.Scatter(
                points,
                name=heat,
                mode="lines+markers",
                line={"shape": "hv", "color": COLORS[heat], "width": 2.5},
                marker={"size": [7] * (len(points["y"]) - 1) + [0]},
                hovertemplate="%{y} after %{x} s<br>%{text}<extra></extra>",
            )
        )
    if not values:
        return nothing("no trial has a score yet")
    return figure.update_yaxes(score_axis(values, result.mode, result.metric))


def best_lines(record: RunRecord) -> Iterator[tuple[HeatName, dict[str, list[Any]]]]:
    """Yield, for each heat that has a score, its name and the line of its best score, with a point per improvement.

    The last point comes twice, at the time when it was reached and at the end of the heat.
    """
    units = journal_of(record)
    found, last = bests(units, record), max((unit.at for unit in units.values()), default=0.0)
    trained = ((unit.at, line) for unit in units.values() for line in unit.lines if line["event"] == "metrics")
    ends = {line["heat"]: at for at, line in trained} | {"race": last}
    for heat in HEAT_NAMES:
        steps = found.get(heat, ())
        if told := [(step.seconds, step.score, f"trial {step.trial}, epoch {step.epoch}") for step in steps]:
            x, y, text = zip(*told, (ends.get(heat, last), *told[-1][1:]))
            yield heat, {"x": [*map(figures_of, x)], "y": [*map(figures_of, y)], "text": [*text]}


@dataclass(frozen=True)
class _Curve:
    trial: TrialRecord
    epochs: list[int]
    values: list[float]


def learning_curves(result: RunRecord, metric: str | None = None) -> Figure:
    """Draw the metric after each epoch, for surrogates above and for full-size models below.

    If a heat has up to 60 curves, all are drawn, and surrogates have the color of the rung that stopped them. If it has
    more, the figure shows the median and the bands of 25-75 % and 10-90 % over the trials at each epoch. The
    finalists' curves are drawn above these; of more than 60 finalists, only the best 8. Dotted lines are rungs, at
    which trials were compared. Their labels say how many trials went on.

    Args:
        metric: The metric to draw, such as "train_loss"; None for the metric of the run.
    """
    metric = metric or result.metric
    go, order = graph_objects(), best_first(result)
    curves = {heat: _curves(order, heat, metric) for heat in HEAT_NAMES}
    panels = [heat for heat in HEAT_NAMES if curves[heat]]
    if not panels:
        return nothing(f"no trial has a finite {metric} yet")
    # A finalist has the same color in all panels.
    finalists = [trial.trial for trial in order if trial.reached]
    colors = {number: FINALISTS[i % len(FINALISTS)] for i, number in enumerate(finalists)} | {result.best_trial: BEST}
    figure = new_figure(
        height=110 + 330 * len(panels), legend={"yanchor": "top", "y": -0.1 if len(panels) > 1 else -0.2}
    ).set_subplots(rows=len(panels), vertical_spacing=0.14)
    for row, heat in enumerate(panels, 1):
        alone = [curve for curve in curves[heat] if curve.trial.reached]
        if many := len(curves[heat]) > MANY:
            alone = alone if len(alone) <= MANY else alone[: len(FINALISTS)]
            traces = _bands(curves[heat], legend=all(trace.name != "median" for trace in figure.data))
        else:
            traces = _fallen([curve for curve in curves[heat] if not curve.trial.reached], heat)
        best, drawn = result.best_trial, [value for trace in traces for value in trace["y"] if value is not None]
        traces += [_alone(each, colors[each.trial.trial], each.trial.trial == best, heat) for each in alone]
        figure.add_traces([*map(go.Scatter, traces)], rows=row, cols=1)
        values = drawn + [value for curve in alone for value in curve.values]
        epochs = max(epoch for curve in curves[heat] for epoch in curve.epochs)
        tick = {"dtick": 1} if epochs <= 12 else {}
        figure.update_xaxes(title={"text": "epoch"}, range=[0.5, epochs + 0.5], **tick, row=row, col=1)
        shown = 0.75 if heat == "sweep" and not many else 0.95
        figure.update_yaxes(score_axis(values, _mode(result, metric), f"{metric}, {heat}", shown), row=row, col=1)
        _mark_rungs(figure, [reached for trial in order if (reached := in_heat(trial, heat)[1])], row)
    return figure


def _mode(result: RunRecord, metric: str) -> Mode:
    """Return the direction in which a metric is better; if it is unknown, return that of the run's own metric."""
    by_name: Mode = "min" if metric.endswith("loss") else "max" if metric.endswith("accuracy") else result.mode
    return dict(result.comparison.objectives).get(metric, by_name)


def _curves(trials: Iterable[TrialRecord], heat: HeatName, metric: str) -> list[_Curve]:
    found = []
    for trial in trials:
        there = (*trial.history, *trial.live)
        lines = [line for line in there if line["heat"] == heat and line.get(metric) is not None]
        if lines:
            found.append(_Curve(trial, [line["epoch"] for line in lines], [figures_of(line[metric]) for line in lines]))
    return found


def _bands(curves: Sequence[_Curve], legend: bool) -> list[dict[str, Any]]:
    """Make the traces of the bands and the median; at each epoch, all trials with a finite value count."""
    after: dict[int, list[float]] = {}
    for curve in curves:
        for epoch, value in zip(curve.epochs, curve.values):
            if math.isfinite(value):
                after.setdefault(epoch, []).append(value)
    epochs = sorted(after)
    percents = sorted({50, *(percent for band in BANDS for percent in band)})
    found = {p: [figures_of(float(np.percentile(after[epoch], p))) for epoch in epochs] for p in percents}
    traces: list[dict[str, Any]] = []
    for (low, high), strength in zip(BANDS, (0.25, 0.45)):
        color, name = f"rgba({_BAND}, {strength})", f"{low}-{high} % of trials"
        outline = {"x": [*epochs, *epochs[::-1]], "y": [*found[high], *found[low][::-1]], "fill": "toself"}
        look = {"fillcolor": color, "line": {"color": color, "width": 1}, "mode": "lines", "hoverinfo": "skip"}
        traces.append(outline | look | {"name": name, "legendgroup": name, "showlegend": legend})
    told = [
        "<br>".join(f"{low}-{high} %: {show(found[low][i], 4)} to {show(found[high][i], 4)}" for low, high in BANDS)
        for i in range(len(epochs))
    ]
    median = {
        "x": epochs,
        "y": found[50],
        "text": [f"{text}<br>{counted(len(after[epoch]), 'trial')}" for epoch, text in zip(epochs, told)],
        "name": "median",
        "legendgroup": "median",
        "showlegend": legend,
        "mode": "lines+markers",
        "line": {"color": f"rgb({_BAND})", "width": 2},
        "marker": {"size": 5 if len(epochs) < 40 else 3},
        "hovertemplate": "epoch %{x}: median %{y}<br>%{text}<extra></extra>",
    }
    return [*traces, median]


_BAND = "92, 140, 196"


def _fallen(curves: Sequence[_Curve], heat: HeatName) -> list[dict[str, Any]]:
    """Make one trace for all trials that stopped at the same epoch, and one for those that diverged or failed.

    Traces of later epochs have stronger colors.
    """
    bad = [curve for curve in curves if curve.trial.status in ("diverged", "failed")]
    fates: dict[int, list[_Curve]] = {}
    for curve in curves:
        if curve.trial.status not in ("diverged", "failed"):
            fates.setdefault(in_heat(curve.trial, heat)[1], []).append(curve)
    traces = []
    last = max(fates, default=1)
    for epoch, fallen in sorted(fates.items()):
        strength = 0.35 + 0.5 * math.log(1 + epoch) / math.log(1 + last)
        going_on = {curve.trial.status for curve in fallen} == {"undecided"}
        name = f"{'at' if going_on else 'fell at'} epoch {epoch} ({len(fallen)})"
        traces.append(_together(fallen, name, f"rgba({_BAND}, {strength:.2f})"))
    if bad:
        traces.append(_together(bad, f"diverged or failed ({len(bad)})", BAD))
    return traces


def _together(curves: Sequence[_Curve], name: str, color: str) -> dict[str, Any]:
    return {
        **broken_line((curve.epochs, curve.values, f"trial {curve.trial.trial}") for curve in curves),
        "name": name,
        "mode": "lines+markers",
        "line": {"color": color, "width": 1},
        "marker": {"size": 4},
        "hovertemplate": "%{text}<br>epoch %{x}: %{y}<extra></extra>",
    }


def _alone(curve: _Curve, color: str, best: bool, heat: HeatName) -> dict[str, Any]:
    """Make the trace of a finalist's curve; only the trace at full size has an entry in the legend."""
    trial = curve.trial
    return {
        "x": curve.epochs,
        "y": curve.values,
        "name": f"trial {trial.trial}{' (best)' if best else ''}",
        "legendgroup": f"trial {trial.trial}",
        "showlegend": heat == "race",
        "mode": "lines+markers",
        "line": {"color": color, "width": 3 if best else 2},
        "marker": {"size": 5 if len(curve.epochs) < 40 else 3},
        "hovertemplate": f"{describe(trial)}<br>epoch %{{x}}: %{{y}}<extra></extra>",
    }


def _mark_rungs(figure: Figure, reached: Sequence[int], row: int) -> None:
    """Draw a vertical line at each epoch at which trials stopped, marked with the number that went on.

    `reached` has the last epoch of each trial.
    """
    stops = sorted(set(reached))
    if len(stops) > 12:  # an asynchronous scheduler stops trials at any epoch, so these are no rungs
        return
    for stop in stops[:-1]:
        counts = f"{sum(at > stop for at in reached)} of {sum(at >= stop for at in reached)}"
        line, note = {"color": FAINT, "width": 1, "dash": "dot"}, {"text": counts, "font": {"size": 11}}
        figure.add_vline(stop, line=line, annotation=note, annotation_position="top", row=row, col=1)


_LINES: dict[HeatName, dict[str, Any]] = {
    "sweep": {"dash": "dot", "width": 1.5},
    "middle": {"dash": "dash", "width": 2},
    "race": {"dash": "solid", "width": 2.5},
}


def _line(run: int, heat: HeatName) -> dict[str, Any]:
    return {**_LINES[heat], "color": FINALISTS[run % len(FINALISTS)]}


def best_scores(records: Sequence[RunRecord]) -> Figure:
    """Draw the best score so far of each run against its wall time; lines of surrogates are dotted."""
    go, figure = graph_objects(), new_figure(xaxis={"title": {"text": "seconds"}, "rangemode": "tozero"})
    values = []
    for i, (record, name) in enumerate(zip(records, names_of(records))):
        for heat, points in best_lines(record):
            values += points["y"]
            figure.add_trace(
                go.Scatter(
                    points,
                    name=escaped(f"{name}, {heat}"),
                    mode="lines",
                    line={"shape": "hv", **_line(i, heat)},
                    hovertemplate=f"{escaped(name)}: %{{y}} after %{{x}} s<br>%{{text}}<extra></extra>",
                )
            )
    if not values:
        return nothing("no trial has a score yet")
    return figure.update_yaxes(score_axis(values, records[0].mode, records[0].metric))


def winners_curves(records: Sequence[RunRecord]) -> Figure:
    """Draw the learning curve of each run's best trial; the curve of its surrogate is dotted."""
    go, figure = graph_objects(), new_figure(xaxis={"title": {"text": "epoch"}})
    values = []
    for i, (record, name) in enumerate(zip(records, names_of(records))):
        best = [trial for trial in record.trials if trial.trial == record.best_trial]
        curves = {heat: curve for heat in HEAT_NAMES for curve in _curves(best, heat, record.metric)}
        for heat, curve in curves.items():
            values += curve.values
            told = f"{escaped(name)}, trial {record.best_trial}, {heat}"
            figure.add_trace(
                go.Scatter(
                    x=curve.epochs,
                    y=curve.values,
                    name=told,
                    mode="lines",
                    line=_line(i, heat),
                    hovertemplate=f"{told}<br>epoch %{{x}}: %{{y}}<extra></extra>",
                )
            )
    if not values:
        return nothing("no trial has a score yet")
    return figure.update_yaxes(score_axis(values, records[0].mode, records[0].metric))
