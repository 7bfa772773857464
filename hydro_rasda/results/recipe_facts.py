"""Collects the facts for a plain loop that trains a trial again; refuses trainings that no plain loop can repeat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fusion.keys import OPTIMIZERS, SCHEDULES, read, split_key
from hydro_rasda.common.secret_masking import hide
from hydro_rasda.common.short_values import show
from hydro_rasda.common.trial import Trial
from hydro_rasda.history.lines import Unit
from hydro_rasda.problem.lr_roles import asked_roles, by_parameter, roles_of
from hydro_rasda.problem.objective import ByPart, Supervised, Written
from hydro_rasda.problem.precision import as_given
from hydro_rasda.problem.problem import Problem
from hydro_rasda.problem.width_argument import width_form
from hydro_rasda.records.records import RunRecord, TrialRecord
from hydro_rasda.records.report import chosen_line
from hydro_rasda.records.summary import averages, averages_count, swept_epochs
from hydro_rasda.results.export import checkpoint_of, unkept_of
from hydro_rasda.results.recipe_data_and_seeds import Form
from hydro_rasda.results.recipe_training_loop import Recipe, written
from hydro_rasda.run.pickling import Gone
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.run_json import read_asked
from hydro_rasda.settings.config import GLOBAL_BATCH


def recipe_of(record: RunRecord, problem: Problem, trial: int | None = None) -> str:
    """Write a trial's recipe: see `TuneResult.recipe`."""
    number, checkpoint = checkpoint_of(record, trial)
    once_more = checkpoint.name.startswith("race.refit-")
    found = record.shown().trials[number]
    asked, objective = read_asked(record.path), as_given(problem.objective)
    if "train" in asked["digests"]:
        raise _cannot(number, "`train` trained it: that function is the recipe, with `best_config`")
    if getattr(objective, "optimizer_settings", None) is not None:
        raise _cannot(number, "its objective says by itself how parameters are updated (`optimizer_settings`)")
    models = problem.settings.models("race")
    if models > 1 and not (once_more or (problem.settings.race.refit and not problem.settings.folds)):
        raise _cannot(
            number, f"it is {models} models, whose mean counts; `race=RaceConfig(refit=True)` makes one of the winner"
        )
    # With folds, the winner trains once more from its initial weights, on all examples.
    swept = 0 if once_more else swept_epochs(found, problem.settings.sweep.surrogate)
    _check_own_weights(number, swept, Store.read(record.path).units())
    workers = _workers(found)
    settings = problem.settings
    kept = hide(found.config, unkept_of(record, number))
    config = _as_asked(_by_parameter(problem, number, kept, asked["model"]), number)
    title = [f"Trains trial {number} of the run {record.path.name!r} again, as it was trained at full size."]
    title += [f"There {record.metric} was {show(found.metric, 6)} after epoch {found.kept_epoch} of {found.epochs}."]
    title += [f"{line[0].upper()}{line[1:]}." for line in chosen_line(record) if number == record.best_trial]
    if workers > 1:
        title.append(f"{workers} workers shared each batch: with dropout or BatchNorm, one worker's numbers differ.")
    return written(
        Recipe(
            title=title,
            config=config,
            trial=number,
            epochs=int(found.kept_epoch),
            settings=settings,
            averaged_from=swept if averages(settings, config) and averages_count(settings, found) else None,
            data=_form(asked["train_data"]),
            objective="objective" in asked["digests"],
            by_part=bool(asked.get("parts")),
            configured=objective.configured if isinstance(objective, (Supervised, Written, ByPart)) else None,
            width="unknown" if isinstance(problem.model_fn, Gone) else width_form(problem.model_fn),
            copied=problem.copied,
        )
    )


def _cannot(number: int, why: str) -> ValueError:
    return ValueError(f"no plain loop trains trial {number} again: {why}")


def _workers(trial: TrialRecord) -> int:
    """Return the number of workers on which a trial trained; ValueError if batch or learning rate grew with them."""
    lines = [line for line in trial.history if line["heat"] == "race" and line["epoch"] <= trial.kept_epoch]
    batches = list(dict.fromkeys(line[GLOBAL_BATCH] for line in lines if GLOBAL_BATCH in line))
    multipliers = {line.get("lr_multiplier", 1.0) for line in lines} - {1.0}
    if {*batches} - {read(trial.config, "batch_size")} or multipliers:
        told = " and then ".join(map(str, batches))
        why = f"workers were added in training, which its batch ({told} examples) and its learning rate followed"
        raise _cannot(trial.trial, f"{why}; `RaceConfig(max_workers=...)` of as many as `workers` adds none")
    return max((int(line.get("workers", 1)) for line in lines), default=1)


def _check_own_weights(number: int, swept: int, units: Mapping[str, Unit]) -> None:
    """Refuse a trial that went on with another one's weights, or with other hyperparameters than it began with."""
    own = re.compile(rf"race/trial-{number}/to-\d+")
    values = {key: unit.value for key, unit in units.items() if isinstance(unit.value, Mapping)}
    changed = any("origin" in value or "mutable" in value for key, value in values.items() if own.fullmatch(key))
    copied = swept and any(str(number) in value.get("copies", ()) for key, value in values.items() if "/group-" in key)
    if changed or copied:
        raise _cannot(number, "it went on from another trial's weights, or its hyperparameters changed in training")


def _by_parameter(problem: Problem, number: int, config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Replace learning rates by role with learning rates by parameter; ValueError if no model tells the roles.

    Args:
        names: Names of the parameters of one of the run's models. A key such as "lr.hidden" is no role if the model has
            a part of that name.
    """
    if isinstance(problem.model_fn, Gone):
        if not asked_roles(config, names):
            return config
        why = "its model alone tells which parameters have learning rates by role"
        raise _cannot(number, f"{why}; the result that `tune` returned has it")
    return by_parameter(config, roles_of(problem.target(Trial(number, config))))


def _as_asked(config: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Return the configuration unchanged; ValueError if its optimizer or schedule is a function known only by name."""
    of_parts = [(key, OPTIMIZERS) for key in config if split_key(key)[0] == "optimizer"]
    for key, known in (*of_parts, ("schedule", SCHEDULES)):
        named = config.get(key)
        if isinstance(named, str) and named not in known:
            why = f"`{key}` is a function, of which a loaded run knows the name alone ({named})"
            raise _cannot(number, f"{why}; the result that `tune` returned has it")
    return config


def _form(described: str) -> Form:
    """Read the form of the training data from the text that `Batches.describe` wrote."""
    if described.startswith("tensors ("):
        return "tensors"
    return "loaders" if described.startswith("loaders from ") else "dataset"
