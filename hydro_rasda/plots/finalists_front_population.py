"""Figures that compare trials: surrogates with full size, the Pareto front of several metrics, and PBT's copies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from hydro_rasda.history.lineage import Ancestor, Copy, decided_copies
from hydro_rasda.plots.figure_style import (
    BEST,
    FAINT,
    FINALISTS,
    LOG,
    WIDE,
    Figure,
    describe,
    escaped,
    figures_of,
    graph_objects,
    new_figure,
    nothing,
    score_axis,
)
from hydro_rasda.records.records import RunRecord, TrialRecord
from hydro_rasda.records.report import agreement_line
from hydro_rasda.records.timeline import journal_of
from hydro_rasda.settings.objectives import Objectives


def narrow_vs_full(result: RunRecord) -> Figure:
    """Draw each finalist's score on its surrogate against that at full size, and say whether the rankings agree."""
    found = result.agreement
    both = {n: pair for n, pair in found.scores.items() if all(map(math.isfinite, pair))} if found else {}
    if found is None or not both:
        return nothing("no trial has a score both on a narrower surrogate and at full size yet")
    go, narrow = graph_objects(), min(found.epoch, *(result.trials[n].sweep_epochs for n in found.scores))
    figure = new_figure(
        xaxis={"title": {"text": escaped(f"{result.metric}, surrogate, epoch {narrow}")}},
        yaxis={"title": {"text": escaped(f"{result.metric}, full size, epoch {found.epoch}")}},
        showlegend=False,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
    )
    best = [number == result.best_trial for number in both]
    trials = [result.trials[number] for number in both]
    figure.add_trace(
        go.Scatter(
            x=[figures_of(narrow) for narrow, _ in both.values()],
            y=[figures_of(full) for _, full in both.values()],
            mode="markers+text",
            text=[str(number) for number in both],
            textposition="top center",
            customdata=[f"{describe(trial)}<br>in the end {figures_of(trial.metric)} at full size" for trial in trials],
            hovertemplate="%{customdata}<br>%{x} on its surrogate<br>%{y} at full size<extra></extra>",
            marker={
                "line": {"width": 0},
                "size": [13 if each else 10 for each in best],
                "color": [BEST if each else FINALISTS[0] for each in best],
            },
            cliponaxis=False,
        )
    )
    # Two lines fit the narrow screen of a phone.
    told = "<br>".join(escaped(part) for line in agreement_line(result) for part in line.split(": ", 1))
    place = {"x": 0, "y": 1.02, "xref": "paper", "yref": "paper", "align": "left", "yanchor": "bottom"}
    return figure.add_annotation(text=told, showarrow=False, **place)


def front(result: RunRecord) -> Figure:
    """Draw the full-size models by the first two metrics of `tune`; a line joins those on the Pareto front."""
    objectives = result.comparison.objectives
    trials = {
        t.trial: (t, [t.metrics.get(name, math.nan) for name, _ in objectives]) for t in result.trials if t.epochs
    }
    trials = {n: (trial, values) for n, (trial, values) in trials.items() if all(map(math.isfinite, values))}
    if len(objectives) < 2 or not trials:
        few = len(objectives) < 2
        return nothing("one metric alone was asked for" if few else "no full-size model has a score in each metric yet")
    go, best = graph_objects(), [trial.trial for trial in result.pareto]
    (down, _), (across, _), *_ = objectives
    columns = {name: [values[i] for _, values in trials.values()] for i, (name, _) in enumerate(objectives[:2])}
    figure = new_figure(
        xaxis=score_axis(columns[across], "min", across, 1.0), yaxis=score_axis(columns[down], "min", down, 1.0)
    )
    others = [number for number in trials if number not in best]
    joined = sorted(best, key=lambda number: trials[number][1][1])
    looks: list[tuple[str, list[int], dict[str, Any]]] = [
        ("other models", others, {"mode": "markers", "marker": {"color": FINALISTS[0], "size": 9}}),
        (
            "the front",
            joined,
            {"mode": "lines+markers", "marker": {"color": BEST, "size": 12}, "line": {"dash": "dot"}},
        ),
    ]
    for name, numbers, look in looks:
        told = [_of_point(trials[n][0], objectives) for n in numbers]
        figure.add_trace(
            go.Scatter(
                x=[figures_of(trials[n][1][1]) for n in numbers],
                y=[figures_of(trials[n][1][0]) for n in numbers],
                name=name,
                customdata=told,
                hovertemplate="%{customdata}<extra></extra>",
                **look,
            )
        )
    return figure


def _of_point(trial: TrialRecord, objectives: Objectives) -> str:
    return "<br>".join(
        [describe(trial), *(f"{escaped(name)} {figures_of(trial.metrics[name])}" for name, _ in objectives)]
    )


def population(result: RunRecord, name: str = "lr") -> Figure:
    """Draw a hyperparameter of all trials over the sweep's epochs, PBT's copies, and the best trial's lineage.

    Args:
        name: The hyperparameter; copies must change it.
    """
    copies = [copy for together in decided_copies(journal_of(result)) for copy in together]
    copies = [copy for copy in copies if name in copy.before and name in copy.after]
    if not copies:
        return nothing(f"no trial went on as a copy with another {name}: the sweep is no population")
    go, told = graph_objects(), escaped(name)
    lives = [
        life
        for record in result.trials
        if record.sweep_epochs
        for life in _lives(record, copies)
        if name in life.config
    ]
    figure = new_figure(xaxis={"title": {"text": "epoch of the sweep"}}, yaxis={"title": {"text": told}})
    values = [float(life.config[name]) for life in lives]
    if min(values) > 0 and max(values) / min(values) > WIDE:
        figure.update_yaxes(LOG)
    x, y, text = list[float | None](), list[float | None](), list[str]()
    for life in lives:
        x += [life.start, life.stop, None]
        y += [figures_of(life.config[name])] * 2 + [None]
        text += [f"trial {life.trial}, epochs {life.start + 1} to {life.stop}"] * 3
    line = {"color": FAINT, "width": 1.5}
    hover = f"%{{text}}<br>{told}=%{{y}}<extra></extra>"
    figure.add_trace(go.Scatter(x=x, y=y, text=text, mode="lines", name="trials", line=line, hovertemplate=hover))
    x, y, text = [], [], []
    for copy in copies:
        x += [copy.epoch, copy.epoch, None]
        y += [figures_of(copy.before[name]), figures_of(copy.after[name]), None]
        text += [f"trial {copy.trial} copies trial {copy.source}"] * 3
    line = {"color": FINALISTS[0], "width": 1}
    marked = {"mode": "lines+markers", "marker": {"size": [0, 5, 0] * len(copies)}}
    figure.add_trace(go.Scatter(x=x, y=y, text=text, name="copies", line=line, hovertemplate=hover, **marked))
    ancestors = [ancestor for ancestor in result.lineage(result.best_trial) if name in ancestor.config]
    figure.add_trace(
        go.Scatter(
            x=[at for ancestor in ancestors for at in (ancestor.start, ancestor.stop)],
            y=[figures_of(ancestor.config[name]) for ancestor in ancestors for _ in range(2)],
            text=[f"trial {ancestor.trial}" for ancestor in ancestors for _ in range(2)],
            name=f"lineage of trial {result.best_trial}",
            mode="lines",
            line={"color": BEST, "width": 3},
            hovertemplate=hover,
        )
    )
    return figure


def _lives(record: TrialRecord, copies: list[Copy]) -> Iterator[Ancestor]:
    """Yield the spans of epochs in which a trial had one configuration, including spans before a copy replaced it."""
    own = [copy for copy in copies if copy.trial == record.trial]
    configs = [*(copy.replaced for copy in own), record.config]
    bounds = [0, *(copy.epoch for copy in own), record.sweep_epochs]
    for config, (start, stop) in zip(configs, pairwise(bounds)):
        yield Ancestor(record.trial, start, stop, config)
