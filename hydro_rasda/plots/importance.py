"""How much each hyperparameter mattered, by Optuna's fANOVA.

Trials stop at different epochs, so their scores cannot be compared. Their places in the ranking can: successive
halving ranks trials by the epochs that they reached, then by score, with diverged and failed trials last.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from hydro_rasda.common.optional_packages import needed_by
from hydro_rasda.plots.figure_style import (
    FINALISTS,
    Figure,
    begun,
    escaped,
    figures_of,
    graph_objects,
    new_figure,
    nothing,
    score_of,
    thinned,
)
from hydro_rasda.records.optuna_study import make_study, quiet
from hydro_rasda.records.records import RunRecord

if TYPE_CHECKING:
    from optuna import Study

FEWEST = 8
"""The fewest trials for which importances are computed."""

_ALONE = Lock()
"""A lock for `catch_warnings`, which is not thread-safe: a dashboard has several threads."""

_TREES, _FOR_IMPORTANCE = 16, 150
"""The number of fANOVA's trees, and the most trials that it gets. It then takes a quarter of a second. Twice as many of
both change the shares only as much as another seed does."""


def importances(result: RunRecord) -> Figure:
    """Draw how much each hyperparameter mattered for the place of a trial, in shares of 1.

    The method is Optuna's fANOVA (Hutter et al. 2014); if the space has branches, its PED-ANOVA (Watanabe et al. 2023).

    Raises:
        ImportError: if Plotly, Optuna or scikit-learn is not there.
    """
    found = importance_of(result)
    return importance_bars(found) if found else nothing(too_few(result))


def importance_bars(found: Mapping[str, float]) -> Figure:
    """Draw the shares of `importance_of` as bars, the largest at the top."""
    go = graph_objects()
    names = [*found][::-1]
    figure = new_figure(height=90 + 32 * len(names), showlegend=False)
    # The axis goes beyond 1 to leave room for the number next to a long bar.
    axis = {"title": {"text": "importance"}, "range": [0, 1.2], "tickvals": [0, 0.2, 0.4, 0.6, 0.8, 1]}
    figure.update_layout(xaxis=axis, yaxis={"automargin": True})
    return figure.add_trace(
        go.Bar(
            x=[figures_of(found[name]) for name in names],
            y=[escaped(name) for name in names],
            text=[f"{found[name]:.2f}" for name in names],
            textposition="outside",
            cliponaxis=False,
            orientation="h",
            marker={"color": FINALISTS[0]},
            hovertemplate="%{y}: %{x}<extra></extra>",
        )
    )


def importance_of(result: RunRecord) -> dict[str, float]:
    """Compute the importances, the largest first; empty if too few trials differ, or if the run's folder is gone."""
    if not (result.path / "run.json").is_file():
        return {}
    study = places(result, _FOR_IMPORTANCE)
    trials = study.get_trials(deepcopy=False)
    alike = len({trial.value for trial in trials}) < 2
    if len(trials) < FEWEST or alike or not trials[0].params:
        return {}
    with needed_by("an importance", "report"):
        from optuna.importance import FanovaImportanceEvaluator, PedAnovaImportanceEvaluator, get_param_importances

        # fANOVA needs the same keys in all trials; PED-ANOVA does not.
        if len({frozenset(trial.params) for trial in trials}) > 1:
            with _ALONE, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # earlier versions of Optuna call it experimental
                evaluator: Any = PedAnovaImportanceEvaluator()
        else:
            evaluator = FanovaImportanceEvaluator(n_trees=_TREES, seed=0)
    found = get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in found.items() if math.isfinite(share)}


def places(result: RunRecord, most: int | None = None) -> Study:
    """Make an Optuna study whose values are places, 1 for the best trial; trials that have not begun are left out."""
    import optuna

    with quiet():
        order = [*enumerate(begun(result), 1)]
        kept = thinned(order, most) if most else order
        made = make_study(replace(result, trials=tuple(trial for _, trial in kept))).get_trials(deepcopy=False)
        study = optuna.create_study()
    last = max((place for place, trial in kept if math.isfinite(score_of(trial))), default=0) + 1
    for (place, trial), old in zip(kept, made):
        value = float(place if math.isfinite(score_of(trial)) else last)
        placed = optuna.trial.create_trial(params=old.params, distributions=old.distributions, value=value)
        study.add_trial(placed)
    return study


def too_few(record: RunRecord, what: str = "hyperparameters that differ") -> str:
    """Say why there is nothing to show about the hyperparameters."""
    count = len(begun(record))
    return f"{count} of {len(record.trials)} trials have begun: too few to tell, or without {what}"
