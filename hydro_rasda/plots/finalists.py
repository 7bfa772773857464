"""Narrow against full: whether what did well on a surrogate does well at full size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydro_rasda.plots.look import BEST, FINALISTS, describe, escaped, figures_of, graph_objects, new_figure, nothing
from hydro_rasda.run.records import RunRecord, TrialRecord

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ENOUGH = 5
"""Finalists below which their rank correlation is chance."""


def narrow_vs_full(result: RunRecord) -> Figure:
    """Each finalist's last score on its surrogate against its score at full size, with Spearman's rank correlation."""
    both = finalists_with_both(result)
    if not both:
        return nothing("no trial has a score both on its surrogate and at full size yet")
    go = graph_objects()
    figure = new_figure(
        xaxis={"title": {"text": escaped(f"{result.metric}, surrogate")}},
        yaxis={"title": {"text": escaped(f"{result.metric}, full size")}},
        showlegend=False,
    )
    best = [trial.trial == result.best_trial for trial in both]
    figure.add_trace(
        go.Scatter(
            x=[figures_of(trial.surrogate_metric) for trial in both],
            y=[figures_of(trial.metric) for trial in both],
            mode="markers+text",
            text=[str(trial.trial) for trial in both],
            textposition="top center",
            customdata=[f"{describe(trial)}<br>epoch {trial.kept_epoch} of {trial.epochs}" for trial in both],
            hovertemplate="%{customdata}<br>%{x} on its surrogate<br>%{y} at full size<extra></extra>",
            marker={
                "line": {"width": 0},
                "size": [13 if each else 10 for each in best],
                "color": [BEST if each else FINALISTS[0] for each in best],
            },
            cliponaxis=False,
        )
    )
    return figure.add_annotation(
        text=escaped(agreement(both)), x=0, y=1.02, xref="paper", yref="paper", showarrow=False, yanchor="bottom"
    )


def finalists_with_both(record: RunRecord) -> list[TrialRecord]:
    """Trials with a finite score on both stages."""
    return [trial for trial in record.trials if math.isfinite(trial.metric) and math.isfinite(trial.surrogate_metric)]


def rank_correlation(trials: Sequence[TrialRecord]) -> float:
    """Spearman's, between narrow and full scores; NaN for fewer than two trials, or where one of them is constant."""
    import pandas as pd

    frame = pd.DataFrame({"narrow": [t.surrogate_metric for t in trials], "full": [t.metric for t in trials]}).rank()
    if len(trials) < 2 or frame["narrow"].nunique() < 2 or frame["full"].nunique() < 2:
        return math.nan
    return float(frame["narrow"].corr(frame["full"]))


def agreement(trials: Sequence[TrialRecord]) -> str:
    """The rank correlation in words; the best few of many lie close, so that it is lower than that of all."""
    rho, count = rank_correlation(trials), len(trials)
    if math.isnan(rho):
        return f"{count} finalist{'' if count == 1 else 's'}: no rank correlation"
    told = f"rank correlation {rho:.2f} over {count} finalists"
    if count < ENOUGH:
        return f"{told}: too few"
    return f"{told}: {'they agree' if rho >= 0.6 else 'they disagree' if rho < 0 else 'they agree in part'}"
