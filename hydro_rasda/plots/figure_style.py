"""The style of all figures: colors for light and dark backgrounds, axes, and the format of values."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from hydro_rasda.common.optional_packages import needed_by
from hydro_rasda.common.short_values import show
from hydro_rasda.records.records import RunRecord, TrialRecord
from hydro_rasda.records.report import best_first
from hydro_rasda.settings.config import Mode

Figure = Any
"""A Plotly figure. Plotly takes long to import, so `graph_objects` imports it when the first figure is drawn."""

BEST, BAD, FAINT = "#e8590c", "#e03131", "rgba(134, 142, 150, 0.45)"
FINALISTS = ("#1c7ed6", "#2f9e44", "#ae3ec9", "#0c8599", "#f08c00", "#5c7cfa", "#82c91e", "#d6336c")
SCALE = [[0, "#e8590c"], [0.2, "#f59f00"], [0.55, "#4dabf7"], [1, "#868e96"]]
"""A color scale from the best to the worst trial."""

HEIGHT = 380
"""The height of a figure in pixels."""

LOG = {"type": "log", "exponentformat": "e", "minorloglabels": "complete"}
"""A logarithmic axis with complete numbers as labels, such as 0.2 and 1e-4. By default, Plotly writes 2 and 100 µ."""

POINTS = 2_000
"""The most points of one kind in a figure; more are thinned evenly, so that pages stay small and browsers fast."""


def new_figure(**layout: Any) -> Figure:
    """Make an empty figure; without Plotly, raise an ImportError that says what to install."""
    go = graph_objects()
    figure = go.Figure()
    figure.update_layout(height=HEIGHT, margin={"l": 60, "r": 20, "t": 30, "b": 50}, hovermode="closest")
    figure.update_layout(legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"})
    figure.update_layout(**layout)
    return figure


def graph_objects() -> Any:
    """Import and return `plotly.graph_objects`; ImportError without Plotly."""
    with needed_by("a figure", "report"):
        import plotly.graph_objects
    return plotly.graph_objects


def nothing(why: str) -> Figure:
    """Make a figure without data that says why it is empty."""
    figure = new_figure(height=140, xaxis={"visible": False}, yaxis={"visible": False})
    return figure.add_annotation(text=escaped(why), showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")


def is_empty(figure: Figure) -> bool:
    """Return whether a figure has no data, such as a figure from `nothing`."""
    return not figure.data


def escaped(value: Any) -> str:
    """Return a user's value as escaped text, because Plotly would read `<b>` as bold."""
    return html.escape(show(value, 4), quote=False)


def describe(trial: TrialRecord) -> str:
    """Describe a trial in lines for the hover box of a point."""
    return "<br>".join([f"trial {trial.trial}, {trial.status}", *(f"{k}={escaped(v)}" for k, v in trial.used.items())])


def scored(record: RunRecord) -> list[TrialRecord]:
    """Return the trials with a finite `score_of`, the best first."""
    return [trial for trial in best_first(record) if math.isfinite(score_of(trial))]


def score_of(trial: TrialRecord) -> float:
    """Return a trial's score at full size; if it did not train there, return its score on the surrogate."""
    return trial.metric if trial.epochs else trial.sweep_metric


def begun(record: RunRecord) -> list[TrialRecord]:
    """Return all trials that have begun, the best first; diverged and failed trials come last."""
    order = [trial for trial in best_first(record) if trial.status != "not begun"]
    return sorted(order, key=lambda trial: trial.status in ("diverged", "failed"))


def thinned(items: Sequence[Any], most: int = POINTS) -> list[Any]:
    """Return at most `most` items at even distances, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]


def broken_line(pieces: Iterable[tuple[Sequence[float], Sequence[float], str]]) -> dict[str, list[Any]]:
    """Join lines to one trace with gaps between them; each piece has its x and y values, and a text for all of them."""
    joined: dict[str, list[Any]] = {"x": [], "y": [], "text": []}
    for x, y, text in pieces:
        joined["x"] += [*x, None]
        joined["y"] += [*map(figures_of, y), None]
        joined["text"] += [text] * len(x) + [None]
    return joined


def score_axis(values: Iterable[float], mode: Mode, title: str, shown: float = 0.95) -> dict[str, Any]:
    """Make an axis of scores on which a reader can distinguish good scores.

    The axis is logarithmic if the scores span more than a factor of `WIDE`. It ends a little beyond the best share
    `shown` of the scores, so that far outliers lie outside.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    axis: dict[str, Any] = {"title": {"text": escaped(title)}}
    if len(finite) < 2 or finite[0] == finite[-1]:
        return axis
    if finite[0] > 0 and finite[-1] / finite[0] > WIDE:
        finite = [math.log10(value) for value in finite]
        axis |= LOG
    low, high, last = finite[0], finite[-1], len(finite) - 1
    if mode == "min":
        inner = finite[round(shown * last)]
        high = min(high, inner + 0.25 * (inner - low)) if inner > low else high
    else:
        inner = finite[last - round(shown * last)]
        low = max(low, inner - 0.25 * (high - inner)) if inner < high else low
    if axis.get("type") == "log":
        axis["dtick"] = "D2" if high - low < 3 else 1  # labels at 1, 2 and 5 of each decade, or at 1 only
    pad = 0.05 * (high - low)
    return axis | {"range": [low - pad, high + pad]}


WIDE = 20
"""An axis of positive values is logarithmic if their largest ratio exceeds this."""


def figures_of(value: float) -> float:
    """Round a value to five digits, because a page holds many numbers and must stay small."""
    return float(f"{value:.5g}")
