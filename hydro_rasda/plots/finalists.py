"""Narrow against full: whether what did well on a surrogate does well at full size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hydro_rasda.plots.look import BEST, FINALISTS, describe, escaped, figures_of, graph_objects, new_figure, nothing
from hydro_rasda.results.records import RunRecord
from hydro_rasda.results.report import agreement_line

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def narrow_vs_full(result: RunRecord) -> Figure:
    """Each finalist's score on its surrogate against that at full size after the same epoch, and whether they agree."""
    found = result.agreement
    both = {n: pair for n, pair in found.scores.items() if all(map(math.isfinite, pair))} if found else {}
    if found is None or not both:
        return nothing("no trial has a score both on a narrower surrogate and at full size yet")
    go, narrow = graph_objects(), min(found.epoch, *(result.trials[n].surrogate_epochs for n in found.scores))
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
    # In two lines, as a phone is narrow.
    told = "<br>".join(escaped(part) for line in agreement_line(result) for part in line.split(": ", 1))
    place = {"x": 0, "y": 1.02, "xref": "paper", "yref": "paper", "align": "left", "yanchor": "bottom"}
    return figure.add_annotation(text=told, showarrow=False, **place)
