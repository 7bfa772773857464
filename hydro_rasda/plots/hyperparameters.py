"""Figures of hyperparameters: where good trials lie in the search space, and how much each hyperparameter mattered.

Trials stop at different epochs, so their scores cannot be compared. Their places in the ranking can be compared. The
ranking is that of successive halving: trials that reached more epochs come first, then those with better scores, and
diverged and failed trials come last. Optuna's fANOVA computes how important each hyperparameter is for these places.
"""

from __future__ import annotations

import html
import math
import sys
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from hydro_rasda.common.argument_checks import is_metric, require
from hydro_rasda.common.optional_packages import needed_by
from hydro_rasda.common.short_values import counted, numbers_first, show
from hydro_rasda.plots.figure_style import (
    FINALISTS,
    LOG,
    SCALE,
    Figure,
    begun,
    describe,
    escaped,
    figures_of,
    graph_objects,
    new_figure,
    nothing,
    score_axis,
    score_of,
    scored,
    thinned,
)
from hydro_rasda.records.optuna_study import domains_in_words, make_study, quiet
from hydro_rasda.records.records import RunRecord, TrialRecord, flat
from hydro_rasda.records.report import varied
from hydro_rasda.run.run_json import read_asked

if TYPE_CHECKING:
    from optuna import Study


def slices(result: RunRecord, names: Sequence[str] | None = None) -> Figure:
    """Draw the score against each hyperparameter: a dot for each trial, colored by its number of epochs.

    Args:
        names: Hyperparameters; None for all that differ between trials. A nested hyperparameter is named "a/b".
    """
    go, trials = graph_objects(), thinned(scored(result), _DOTS)
    names = list(varied(result) if names is None else _known(result, "names", names))
    if not trials or not names:
        return nothing(too_few(result))
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    grid = {"rows": rows, "columns": columns, "pattern": "independent", "xgap": 0.18, "ygap": 0.35}
    figure = new_figure(height=50 + 250 * rows, showlegend=False, grid=grid)
    scores, even = score_axis([score_of(trial) for trial in trials], result.mode, result.metric), _evenly_drawn(result)
    # The best trials are drawn last, above the others.
    trials = trials[::-1]
    dots = {
        "y": [figures_of(score_of(trial)) for trial in trials],
        "text": [_where(trial) for trial in trials],
        "mode": "markers",
        "marker": {
            "size": [9 if trial.epochs else 6 for trial in trials],
            "symbol": ["diamond" if trial.epochs else "circle" for trial in trials],
            "color": [figures_of(math.log(1 + (trial.epochs or trial.sweep_epochs))) for trial in trials],
            "colorscale": SCALE,
            "reversescale": True,
            "opacity": 0.85,
            "line": {"width": 0},
        },
    }
    for i, name in enumerate(names, 1):
        x, axis = _axis(name, trials, even)
        told = f"{escaped(name)} %{{x}}<br>{escaped(result.metric)} %{{y}}<br>%{{text}}<extra></extra>"
        figure.add_trace(go.Scatter(dots, x=x, xaxis=f"x{i}", yaxis=f"y{i}", hovertemplate=told))
        figure.update_layout({f"xaxis{i}": axis, f"yaxis{i}": scores})
    return figure


def score_map(result: RunRecord, x: str | None = None, y: str | None = None) -> Figure:
    """Draw two hyperparameters against each other: a dot for each trial, over a heat map of average places.

    Args:
        x: A hyperparameter; None takes the most important one.
        y: Another hyperparameter; None takes the most important one that is left.
    """
    _known(result, "x", [] if x is None else [x])
    _known(result, "y", [] if y is None else [y])
    if x is None or y is None:
        others = [n for n in dict.fromkeys([*importance_of(result), *varied(result)]) if n not in (x, y)]
        x = x or (others.pop(0) if others else None)
        y = y or (others.pop(0) if others else None)
    order = [(place, trial) for place, trial in enumerate(begun(result), 1) if {x, y} <= flat(trial.config).keys()]
    if x is None or y is None or len(order) < FEWEST or not scored(result):
        return nothing(too_few(result, "two hyperparameters that differ"))
    go = graph_objects()
    kept = thinned(order)
    trials = [trial for _, trial in kept]
    places = [place for place, _ in kept]
    even = _evenly_drawn(result)
    (across, axis_x), (up, axis_y) = _axis(x, trials, even), _axis(y, trials, even)
    figure = new_figure(height=460, xaxis=axis_x, yaxis=axis_y, showlegend=False)
    figure.add_trace(
        go.Heatmap(_surface(across, axis_x, up, axis_y, places), colorscale=SCALE, zmin=1, zmax=places[-1], opacity=0.5)
    )
    kept = thinned(kept, _DOTS)
    trials, places = [trial for _, trial in kept], [place for place, _ in kept]
    best = [trial.trial == result.best_trial for trial in trials]
    return figure.add_trace(
        go.Scatter(
            x=_axis(x, trials, even)[0],
            y=_axis(y, trials, even)[0],
            mode="markers",
            text=[f"place {place}<br>{describe(trial)}" for place, trial in kept],
            hovertemplate="%{text}<extra></extra>",
            marker={
                "color": places,
                "colorscale": SCALE,
                "cmin": 1,
                "cmax": places[-1],
                "size": [15 if each else 7 for each in best],
                "symbol": ["star" if each else "circle" for each in best],
                "line": {"width": 1, "color": "white"},
            },
        )
    )


LINES = 200
"""The most trials that can be told apart as lines."""


def parallel_coordinates(result: RunRecord, names: Sequence[str] | None = None) -> Figure:
    """Draw each trial as a line through its hyperparameters to its place in the ranking, colored by its place.

    Lines through the same category are spread around its tick, so that their colors show. Drag along an axis to select
    trials. With more than `LINES` trials, half of the lines are the best trials, and half are an even sample of the
    others.

    Args:
        names: Hyperparameters, in the order of their axes; None for all that differ between trials.
    """
    names = list(varied(result) if names is None else _known(result, "names", names))
    order = [*enumerate(begun(result), 1)]
    if len(order) < 2 or not names:
        return nothing(too_few(result))
    last = order[-1][0]
    if len(order) > LINES:
        order = [*order[: LINES // 2], *thinned(order[LINES // 2 :], LINES // 2)]
    order.reverse()  # the best are drawn last, above the others
    places, trials = [place for place, _ in order], [trial for _, trial in order]
    even = _evenly_drawn(result)
    dimensions = [_fanned(_dimension(name, trials, even)) for name in names]
    dimensions.append({"label": "place", "values": places, "range": [last, 1]})
    lines = {"color": places, "cmin": 1, "cmax": last, "colorscale": SCALE}
    figure = new_figure(height=420, margin={"l": 70, "r": 40, "t": 60, "b": 30})
    return figure.add_trace(graph_objects().Parcoords(line=lines, dimensions=dimensions))


def _dimension(name: str, trials: Sequence[TrialRecord], even: Set[str]) -> dict[str, Any]:
    values, axis = _axis(name, trials, even)
    if axis.get("type") == "category":
        names = axis["categoryarray"]
        places = {value: i for i, value in enumerate(names)}
        named = {"tickvals": [*range(len(names))], "ticktext": [*map(_shortened, names)]}
        return {"label": escaped(name), "values": [places[value] for value in values], **named}
    log = axis.get("type") == "log"
    at = [None if value is None else figures_of(math.log10(value)) if log else value for value in values]
    if not log and None not in at:
        return {"label": escaped(name), "values": at}
    there: list[float] = [value for value in at if value is not None]
    low, high = min(there), max(there)
    whole = [*range(math.ceil(low), math.floor(high) + 1)] if log else []
    ticks: dict[float, str] = {power: show(10.0**power if log else power) for power in whole or [low, high]}
    if None in at:  # a trial without this hyperparameter crosses the axis below all values
        low -= 0.1 * (high - low or 1.0)
        ticks[low] = _ABSENT
    return {
        "label": escaped(name),
        "values": [low if value is None else value for value in at],
        "range": [low, high],
        "tickvals": [*ticks],
        "ticktext": [*ticks.values()],
    }


def _fanned(dimension: dict[str, Any]) -> dict[str, Any]:
    """Spread the lines through each category around its tick, in the order of trials; leave axes of numbers alone."""
    if "ticktext" not in dimension or "range" in dimension:
        return dimension
    at = np.asarray(dimension["values"], dtype=float)
    for place in np.unique(at):
        (lines,) = np.nonzero(at == place)
        if len(lines) > 1:
            at[lines] += np.linspace(-_FAN, _FAN, len(lines))
    ends = [-0.5, len(dimension["ticktext"]) - 0.5]
    return dimension | {"values": [figures_of(value) for value in at], "range": ends}


_FAN = 0.35
"""The spread to either side of a tick, as a share of the distance between two categories."""

_DOTS, _GRID = 500, 40


def _where(trial: TrialRecord) -> str:
    if trial.epochs:
        return f"trial {trial.trial}, {counted(trial.epochs, 'epoch')} at full size"
    return f"trial {trial.trial}, {counted(trial.sweep_epochs, 'epoch')} on its surrogate"


def _known(result: RunRecord, argument: str, names: Sequence[str]) -> Sequence[str]:
    """Return names of hyperparameters; ValueError if a trial has begun and no trial has a hyperparameter of a name."""
    require(not isinstance(names, str), argument, names, "a list of hyperparameters")
    known = dict.fromkeys(name for trial in result.trials for name in flat(trial.config))
    for name in names if known else ():
        require(name in known, argument, name, f"a hyperparameter of the run: one of {[*known]}")
    return names


def _evenly_drawn(record: RunRecord) -> Set[str]:
    """Return the names of hyperparameters that the run's space draws evenly, such as by `uniform`."""
    try:
        space = read_asked(record.path)["space"]
    except ValueError:  # the run's folder is gone
        return frozenset()
    domains = (("/".join(path), words) for path, words in domains_in_words(space))
    return {name for name, words in domains if str(words).startswith(("float uniform(", "integer uniform("))}


def _axis(name: str, trials: Sequence[TrialRecord], even: Set[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return the values of a hyperparameter and the axis for them.

    An axis of numbers is logarithmic if they span more than a factor of 20 and the space does not draw them evenly
    (`even`); otherwise it is linear. Other values become category names, and so do at most `_NAMED` different integers.

    A trial without the hyperparameter has the value None on an axis of numbers, and the name `_ABSENT` among names.
    """
    configs = [flat(trial.config) for trial in trials]
    values = [config.get(name, _ABSENT) for config in configs]
    there = [value for value, config in zip(values, configs) if name in config]
    axis: dict[str, Any] = {"title": {"text": escaped(name)}}
    numbers = [v for v in there if is_metric(v) and abs(v) <= sys.float_info.max]
    few = len(set(map(repr, there))) <= _NAMED and all(isinstance(value, int) for value in there)
    if there and len(numbers) == len(there) and not few:
        span = max(numbers) / min(numbers) if min(numbers) > 0 else 1.0
        # Labels at 2, 3, ... 9 of a decade would overlap, so only 1, 2 and 5 have labels; from two decades on, only 1.
        wide = LOG | {"dtick": "D2" if span < 100 else 1}
        own = [figures_of(config[name]) if name in config else None for config in configs]
        return own, axis | (wide if span > 20 and name not in even else {})
    named = [escaped(show(value, 4)) for value in values]
    order = sorted(set(zip(map(numbers_first, values), named)))
    names = [*dict.fromkeys(text for _, text in order)]
    ends: dict[str, Any] = {"range": [-0.5, len(names) - 0.5]}
    if any(len(name) > _LONGEST for name in names):
        ends |= {"tickvals": [*range(len(names))], "ticktext": [_shortened(name) for name in names]}
    return named, axis | {"type": "category", "categoryorder": "array", "categoryarray": names, **ends}


_NAMED, _ABSENT, _LONGEST = 6, "(absent)", 16


def _shortened(name: str) -> str:
    """Shorten the name of a category for the label of an axis; the hover box of a point has the whole name."""
    plain = html.unescape(name)
    return name if len(plain) <= _LONGEST else escaped(f"{plain[: _LONGEST - 1]}…")


def _surface(
    across: Sequence[Any],
    axis_x: Mapping[str, Any],
    up: Sequence[Any],
    axis_y: Mapping[str, Any],
    places: Sequence[int],
) -> dict[str, Any]:
    """Make a heat map of the average place around each grid point (Nadaraya-Watson); None where no trial is near."""
    grid_x, far_x = _distances(across, axis_x)
    grid_y, far_y = _distances(up, axis_y)
    # Shape [y, x, trial]: the weight of a trial falls with its distance.
    near = np.exp(-0.5 * (far_y[:, None, :] ** 2 + far_x[None, :, :] ** 2) / _BANDWIDTH**2)
    weight = near.sum(-1)
    mean = (near * np.asarray(places, dtype=float)).sum(-1) / np.maximum(weight, 1e-12)
    z = [[figures_of(v) if w > _NEAR else None for v, w in zip(*rows)] for rows in zip(mean, weight)]
    return {
        "x": grid_x,
        "y": grid_y,
        "z": z,
        "hoverinfo": "skip",
        "zsmooth": False,
        "colorbar": {"title": {"text": "place"}},
    }


_BANDWIDTH, _NEAR = 0.08, 0.05


def _distances(values: Sequence[Any], axis: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return grid points along an axis, and the distance of each trial to each point in units of the axis' length.

    The distance between different names is 1.
    """
    if axis.get("type") == "category":
        names = list(axis["categoryarray"])
        return names, np.array([[0.0 if value == name else 1.0 for value in values] for name in names])
    log = axis.get("type") == "log"
    at = np.log10(values) if log else np.asarray(values, dtype=float)
    low, high = float(at.min()), float(at.max())
    points = np.linspace(low, high, _GRID)
    told = [figures_of(float(10**point if log else point)) for point in points]
    return told, np.abs(points[:, None] - at[None, :]) / max(high - low, 1e-12)


FEWEST = 8
"""The fewest trials for which importances are computed."""

_ALONE = Lock()
"""A lock for `catch_warnings`, which is not thread-safe. A dashboard has several threads."""

_TREES, _FOR_IMPORTANCE = 16, 150
"""The number of fANOVA's trees, and the most trials that it gets. With these numbers, it takes a quarter of a second.
Twice these numbers change the shares only as much as another seed does."""


def importances(result: RunRecord) -> Figure:
    """Draw how much each hyperparameter mattered for the place of a trial, in shares of 1.

    The method is Optuna's fANOVA (Hutter et al. 2014), or its PED-ANOVA (Watanabe et al. 2023) if the space has
    branches.

    Raises:
        ImportError: if Plotly, Optuna or scikit-learn is not installed.
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
    """Map hyperparameters to the shares that `importances` draws, the largest first.

    Empty if trials are too few or alike, or if the run's folder is gone.
    """
    if not (result.path / "run.json").is_file():
        return {}
    study = places(result, _FOR_IMPORTANCE)
    trials = study.get_trials(deepcopy=False)
    alike = len({trial.value for trial in trials}) < 2
    if len(trials) < FEWEST or alike or not any(trial.params for trial in trials):
        return {}
    with needed_by("an importance", "report"):
        from optuna.importance import FanovaImportanceEvaluator, PedAnovaImportanceEvaluator, get_param_importances

        # fANOVA needs the same keys in all trials; PED-ANOVA does not.
        if len({frozenset(trial.params) for trial in trials}) > 1:
            with _ALONE, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # earlier versions of Optuna warn that PED-ANOVA is experimental
                evaluator: Any = PedAnovaImportanceEvaluator()
        else:
            evaluator = FanovaImportanceEvaluator(n_trees=_TREES, seed=0)
    found = get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in found.items() if math.isfinite(share)}


def places(result: RunRecord, most: int | None = None) -> Study:
    """Make an Optuna study whose values are places in the ranking, 1 for the best.

    It has all trials that have begun; with `most`, an even sample of at most this number. Trials without a finite score
    share the last place.
    """
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
    return f"{count} of {counted(len(record.trials), 'trial')} begun: too few to tell, or without {what}"
