"""A run as an Optuna study, for Optuna's importances, plots and dashboard."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from hydro_rasda.common.argument_checks import is_metric
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.optional_packages import needed_by
from hydro_rasda.history.lines import jsonable
from hydro_rasda.records.records import RunRecord, TrialRecord
from hydro_rasda.run.run_json import read_asked
from hydro_rasda.schedulers.pareto import violation

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

RANGE = re.compile(
    r"(?P<kind>float|integer) (?P<law>uniform|loguniform)\((?P<low>[^,]+), (?P<high>[^,]+)(?:, q=(?P<q>.+))?\)"
)
_CHOICE = re.compile(r"(?:choice|grid_search)\((?P<categories>\[.*\])\)")
_UNBOUNDED = re.compile(r"(?:(?:float|integer) normal|sample_from)\(.*\)")


def make_study(record: RunRecord) -> Study:
    """Make the Optuna study of a run: see `TuneResult.to_optuna`."""
    with needed_by("`to_optuna`", "optuna"):
        import optuna
    asked = read_asked(record.path)
    laws: dict[tuple[str, ...], list[str]] = {}
    for path, words in domains_in_words(asked["space"]):
        laws.setdefault(path, []).append(words)
    varied = {"/".join(path): path for path, of in laws.items() if len({*of}) > 1 or _varies(of[0])}
    values = {
        name: {i: value for i, trial in enumerate(record.trials) for value in _at(trial.config, path)}
        for name, path in varied.items()
    }
    distributions = {name: _distribution({*laws[varied[name]]}, [*of.values()]) for name, of in values.items() if of}
    modes = [mode for _, mode in record.comparison.objectives]
    directions: list[Any] = ["minimize" if mode == "min" else "maximize" for mode in modes]
    with quiet():
        study = optuna.create_study(study_name=record.path.name, directions=directions)
    for name, value in {"metric": record.metric, "run": str(record.path), "finished": record.finished}.items():
        study.set_user_attr(name, value)
    # As in `winner.eligible`: with keep="last", only a trial that trained longest may win; with "best", any trial may.
    furthest = max((trial.epochs for trial in record.trials if math.isfinite(trial.metric)), default=0)
    enough = max(1, furthest) if record.keep == "last" else 1
    for i, trial in enumerate(record.trials):
        params = {name: values[name][i] for name in distributions if i in values[name]}
        if trial.status == "not begun":
            study.enqueue_trial(params)
        else:
            known = {name: distributions[name] for name in params}
            study.add_trial(_trial(record, trial, params, known, enough))
    return study


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within the context, silence Optuna's log, such as the message that a study was created."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _trial(
    record: RunRecord,
    trial: TrialRecord,
    params: Mapping[str, Any],
    distributions: Mapping[str, BaseDistribution],
    enough: int,
) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    heat: HeatName = "race" if trial.epochs else "sweep"
    value = trial.metric if trial.epochs else trial.sweep_metric
    values = [
        value if name == record.metric else trial.metrics.get(name, math.nan)
        for name, _ in record.comparison.objectives
    ]
    scored = all(map(math.isfinite, values))
    curve = {line["epoch"]: line[record.metric] for line in trial.history if line["heat"] == heat}
    more = ("status", "sweep_metric", "sweep_epochs", "epochs", "kept_epoch", "chance", "error")
    # Trials that cannot win are infeasible, so that Optuna's best trial is the winner. A surrogate cannot win, even if
    # it has a better score than the winner. A full-size trial may also have a better score, because scores are those of
    # the kept epoch. But the scores in the end decide which trial wins.
    won = trial.epochs > 0 and trial.trial == record.best_trial
    sign = 1 if record.mode == "min" else -1
    beats = len(values) == 1 and sign * value <= sign * record.best_metric
    may_win = won or (trial.epochs >= enough and not beats)
    broken = violation(trial.metrics, record.comparison.bounds) if record.comparison.bounds and scored else 0.0
    return create_trial(
        state=TrialState.COMPLETE if scored else TrialState.FAIL,
        values=values if scored else None,
        params=dict(params),
        distributions=dict(distributions),
        user_attrs={"heat": heat, **{name: jsonable(getattr(trial, name)) for name in more}},
        system_attrs={"constraints": [0.0 if may_win else 1.0, *([broken] if record.comparison.bounds else [])]},
        intermediate_values={epoch: math.nan if at is None else at for epoch, at in curve.items()},
    )


def _distribution(laws: Set[str], values: Sequence[Any]) -> BaseDistribution:
    """Translate the domains (`laws`) that one key has in the branches of the space to Optuna's terms."""
    if len(laws) == 1:
        return distribution(min(laws), values)
    numeric = all(map(_is_number, values))
    return _span(values) if numeric else _categories("", values)


def distribution(words: str, values: Sequence[Any]) -> BaseDistribution:
    """Translate a domain of the space, in the words of `space.describe`, to Optuna's terms.

    An example of `words` is "float loguniform(0.0001, 1)". `values` are the values of the trials. PBT may leave the
    domain's range, so the range is widened to hold all values. A domain without bounds becomes the range of the values.
    If the domain's categories are objects, or if a value of a numeric domain is no number, the values are the only
    known categories.
    """
    from optuna.distributions import FloatDistribution, IntDistribution

    found, numeric = RANGE.fullmatch(words), all(map(_is_number, values))
    if found is None or not numeric:
        return _span(values) if numeric and values and _UNBOUNDED.fullmatch(words) else _categories(words, values)
    low, high = ast.literal_eval(found["low"]), ast.literal_eval(found["high"])
    log, step = found["law"] == "loguniform", ast.literal_eval(found["q"] or "None")
    integer = found["kind"] == "integer"
    if integer and step is None:
        high -= 1  # Optuna includes the upper bound; Ray Tune does so only if values are multiples of q
    make = IntDistribution if integer and all(map(_is_exact, values)) else FloatDistribution
    outside = any(not low <= value <= high or (step and not _multiple(value - low, step)) for value in values)
    if outside:
        return make(min(low, *values), max(high, *values), log=log and min(values) > 0)
    # Optuna does not allow `step` together with `log=True`.
    return make(low, high, log=log, **({"step": step} if step is not None and not log else {}))


def _is_number(value: Any) -> bool:
    """Tell whether a value is a finite number that Optuna can compute with. Other numbers become categories."""
    return is_metric(value) and abs(value) < _LARGEST


_LARGEST = 1e37
"""Importances are computed by trees of scikit-learn, which hold values in float32."""


def _is_exact(value: Any) -> bool:
    """Tell whether a value is an integer that a float holds, in which Optuna compares it with its bounds."""
    return isinstance(value, int) and abs(value) <= 2**53


def _multiple(value: float, step: float) -> bool:
    return math.isclose(value, step * round(value / step), rel_tol=0, abs_tol=1e-8 * step)


def _span(values: Sequence[Any]) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    make = IntDistribution if all(map(_is_exact, values)) else FloatDistribution
    return make(min(values), max(values))


def _categories(words: str, values: Sequence[Any]) -> BaseDistribution:
    """Return a distribution over the categories that `words` lists and over the values of trials."""
    from optuna.distributions import CategoricalDistribution

    found = _CHOICE.fullmatch(words)
    try:
        named = ast.literal_eval(found["categories"]) if found else []
    except (SyntaxError, ValueError):  # the categories include functions or classes
        named = []
    return CategoricalDistribution(tuple(dict.fromkeys([*map(_category, named), *values])))


def _category(value: Any) -> Any:
    """Return a value as Optuna can store it: JSON if it is no plain value."""
    if isinstance(value, float):
        return math.nan if math.isnan(value) else value  # one object, so that NaN is one category
    if isinstance(value, int) and abs(value) > sys.float_info.max:  # Optuna compares categories as floats
        return str(value)
    value = jsonable(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value)


def _varies(words: str) -> bool:
    return any(pattern.fullmatch(words) for pattern in (RANGE, _CHOICE, _UNBOUNDED))


def domains_in_words(space: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each key of a described space (see `space.describe`) as a path, with its domain in words.

    If several branches of a choice have the same key, it comes once for each of them.
    """
    for name, words in space.items():
        if isinstance(words, Mapping):
            yield from domains_in_words(words, (*path, name))
        elif isinstance(words, list):
            for branch in words:
                yield from domains_in_words(branch, path)
        else:
            yield (*path, name), words


def _at(config: Mapping[str, Any], path: tuple[str, ...]) -> list[Any]:
    value: Any = config
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return []
        value = value[name]
    return [_category(value)]
