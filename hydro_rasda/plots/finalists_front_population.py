"""Figures that compare trials: surrogates with full size, the Pareto front of several metrics, and PBT's copies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from hydro_rasda.common.argument_checks import is_metric
from hydro_rasda.history.lineage import Ancestor, Copy, decided_copies
from hydro_rasda.plots.figure_style import (
    BEST,
    FAINT,
    FINALISTS,
    LOG,
    WIDE,
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
from hydro_rasda.records.records import RunRecord, TrialRecord
from hydro_rasda.records.report import agreement_line
from hydro_rasda.records.timeline import journal_of


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
    # Break the text into two lines, so that it fits the narrow screen of a phone.
    told = "<br>".join(escaped(part) for line in agreement_line(result) for part in line.split(": ", 1))
    place = {"x": 0, "y": 1.02, "xref": "paper", "yref": "paper", "align": "left", "yanchor": "bottom"}
    return figure.add_annotation(text=told, showarrow=False, **place)


def front(result: RunRecord) -> Figure:
    """Draw the full-size models by the first two metrics given to `tune`. A line joins models on the Pareto front."""
    names = [name for name, _ in result.comparison.objectives]
    if len(names) < 2:
        return nothing("one metric alone was asked for")
    trials = [
        trial
        for trial in result.trials
        if trial.epochs and all(math.isfinite(trial.metrics.get(name, math.nan)) for name in names)
    ]
    if not trials:
        return nothing("no full-size model has a score in each metric yet")
    go, best = graph_objects(), {trial.trial for trial in result.pareto}
    values = {trial.trial: {name: figures_of(trial.metrics[name]) for name in names} for trial in trials}
    scores = {
        number: "<br>".join(f"{escaped(name)} {value}" for name, value in of.items()) for number, of in values.items()
    }
    down, across, *_ = names
    axes = [score_axis([of[name] for of in values.values()], "min", name, 1.0) for name in (across, down)]
    figure = new_figure(xaxis=axes[0], yaxis=axes[1])
    others = [trial for trial in trials if trial.trial not in best]
    joined = sorted((trial for trial in trials if trial.trial in best), key=lambda trial: values[trial.trial][across])
    dots: dict[str, Any] = {"mode": "markers", "marker": {"color": FINALISTS[0], "size": 9}}
    line: dict[str, Any] = {"mode": "lines+markers", "marker": {"color": BEST, "size": 12}, "line": {"dash": "dot"}}
    for name, shown, look in (("other models", others, dots), ("the front", joined, line)):
        figure.add_trace(
            go.Scatter(
                look,
                x=[values[trial.trial][across] for trial in shown],
                y=[values[trial.trial][down] for trial in shown],
                name=name,
                customdata=[f"{describe(trial)}<br>{scores[trial.trial]}" for trial in shown],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    return figure


def population(result: RunRecord, name: str | None = None) -> Figure:
    """Draw one hyperparameter of all trials over the sweep's epochs, with PBT's copies and the best trial's lineage.

    Args:
        name: A hyperparameter whose values are numbers. None takes `lr`; if copies do not change it, the first
            hyperparameter that they change.
    """
    copies = [copy for together in decided_copies(journal_of(result)) for copy in together]
    if name is None:
        changed = [key for copy in copies for key in copy.after if copy.after[key] != copy.before.get(key)]
        name = "lr" if "lr" in changed or not changed else changed[0]
    copies = [copy for copy in copies if is_metric(copy.before.get(name)) and is_metric(copy.after.get(name))]
    if not copies:
        return nothing(f"no trial went on as a copy with another {name}: the sweep is no population")
    go, told = graph_objects(), escaped(name)
    lives = [
        life
        for record in result.trials
        if record.sweep_epochs
        for life in _lives(record, copies)
        if is_metric(life.config.get(name))
    ]
    figure = new_figure(xaxis={"title": {"text": "epoch of the sweep"}}, yaxis={"title": {"text": told}})
    values = [float(life.config[name]) for life in lives]
    if min(values) > 0 and max(values) / min(values) > WIDE:
        figure.update_yaxes(LOG)
    spans = broken_line(
        (
            [life.start, life.stop],
            [life.config[name]] * 2,
            f"trial {life.trial}, epochs {life.start + 1} to {life.stop}",
        )
        for life in lives
    )
    jumps = broken_line(
        ([copy.epoch] * 2, [copy.before[name], copy.after[name]], f"trial {copy.trial} copies trial {copy.source}")
        for copy in copies
    )
    look = {"hovertemplate": f"%{{text}}<br>{told}=%{{y}}<extra></extra>", "mode": "lines"}
    figure.add_trace(go.Scatter(spans, **look, name="trials", line={"color": FAINT, "width": 1.5}))
    marked = {"mode": "lines+markers", "marker": {"size": [0, 5, 0] * len(copies)}}
    figure.add_trace(go.Scatter(jumps, **look | marked, name="copies", line={"color": FINALISTS[0], "width": 1}))
    ancestors = [ancestor for ancestor in result.lineage(result.best_trial) if is_metric(ancestor.config.get(name))]
    lineage = {
        "x": [at for ancestor in ancestors for at in (ancestor.start, ancestor.stop)],
        "y": [figures_of(ancestor.config[name]) for ancestor in ancestors for _ in range(2)],
        "text": [f"trial {ancestor.trial}" for ancestor in ancestors for _ in range(2)],
        "name": f"lineage of trial {result.best_trial}",
    }
    return figure.add_trace(go.Scatter(lineage, **look, line={"color": BEST, "width": 3}))


def _lives(record: TrialRecord, copies: list[Copy]) -> Iterator[Ancestor]:
    """Yield each span of epochs in which a trial had one configuration. A span ends when a copy replaces the trial."""
    own = [copy for copy in copies if copy.trial == record.trial]
    configs = [*(copy.replaced for copy in own), record.config]
    bounds = [0, *(copy.epoch for copy in own), record.sweep_epochs]
    for config, (start, stop) in zip(configs, pairwise(bounds)):
        yield Ancestor(record.trial, start, stop, config)
