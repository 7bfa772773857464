"""A population: the values of a hyperparameter over the epochs of the sweep, and who copied whom."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hydro_rasda.plots.look import (
    BEST,
    FAINT,
    FINALISTS,
    LOG,
    Figure,
    escaped,
    figures_of,
    graph_objects,
    new_figure,
    nothing,
)
from hydro_rasda.results.lineage import Ancestor, Copy, decided_copies
from hydro_rasda.results.records import RunRecord, TrialRecord
from hydro_rasda.results.timeline import journal_of

_WIDE = 20
"""An axis of values above 0 is logarithmic from this ratio on."""


def population(result: RunRecord, name: str = "lr") -> Figure:
    """Draw a hyperparameter of each trial over the sweep's epochs, the copies, and the best trial's lineage.

    Args:
        name: A hyperparameter that copies change.
    """
    copies = [copy for together in decided_copies(journal_of(result)) for copy in together]
    copies = [copy for copy in copies if name in copy.before and name in copy.after]
    if not copies:
        return nothing(f"no trial went on as a copy with another {name}: the sweep is no population")
    go, told = graph_objects(), escaped(name)
    lives = [
        life
        for record in result.trials
        if record.surrogate_epochs
        for life in _lives(record, copies)
        if name in life.config
    ]
    figure = new_figure(xaxis={"title": {"text": "epoch of the sweep"}}, yaxis={"title": {"text": told}})
    values = [float(life.config[name]) for life in lives]
    if min(values) > 0 and max(values) / min(values) > _WIDE:
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
    """The spans of a trial with one configuration each, also those whose weights a copy has replaced."""
    own = [copy for copy in copies if copy.trial == record.trial]
    configs = [*(copy.replaced for copy in own), record.config]
    bounds = [0, *(copy.epoch for copy in own), record.surrogate_epochs]
    for config, (start, stop) in zip(configs, pairwise(bounds)):
        yield Ancestor(record.trial, start, stop, config)
