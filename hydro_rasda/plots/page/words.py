"""The texts of a page: the answer and how sure it is, the cost, the failures, and the call of `tune`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hydro_rasda.common.console import duration
from hydro_rasda.common.short_values import counted, error_line, show
from hydro_rasda.history.lines import WIDTHS_OF, jsonable
from hydro_rasda.records.optuna_study import RANGE
from hydro_rasda.records.records import RunRecord, by_heat, in_heat
from hydro_rasda.records.report import (
    agreement_line,
    best_score,
    both_units,
    doubt_line,
    explained,
    front_lines,
    kept_weights,
    live_line,
    progress_of,
    sentence,
    state_of,
)
from hydro_rasda.run.run_json import recorded
from hydro_rasda.schedulers.named_rules import RULES
from hydro_rasda.settings.config import SEARCHERS, RaceConfig, SweepConfig, TuneConfig

Facts = dict[str, str]
"""A table of two columns: names, and texts."""

_NORMAL = re.compile(r"float normal\(-inf, inf(?:, q=(?P<q>.+))?, mean=(?P<mean>.+), sd=(?P<sd>.+)\)")


def answer(record: RunRecord) -> list[str]:
    """Say in sentences which trial is best, its score, and how sure that is."""
    if not record.trials:
        return ["No trial has begun."]
    best, (found, heat) = record.trials[record.best_trial], best_score(record)
    if math.isfinite(best.metric):
        score = f"{show(best.metric, 4)} at full size, of {kept_weights(record)}"
        told = [f"Trial {best.trial} {'wins' if record.ended else 'leads'}: {record.metric} {score}."]
    elif heat is not None:
        told = [
            f"Trial {best.trial} has the best {record.metric} on a surrogate: {show(found, 4)} after "
            f"epoch {in_heat(best, heat)[1]}. No full-size model has a score yet."
        ]
    else:
        told = ["No trial has a finite score."]
    lines = [*filter(None, [live_line(record)]), *front_lines(record), *_doubt(record), *agreement_line(record)]
    return [*told, *map(sentence, lines)]


def _doubt(record: RunRecord) -> list[str]:
    lines = doubt_line(record)
    if record.transfer is not None:
        agreed = f"transfer from surrogates is {record.transfer.verdict}: rank correlation {record.transfer.rho:.2f}"
        lines = [*lines, f"{agreed}. {record.transfer.advice.rstrip('.')}"]
    if not lines and math.isfinite(record.best_metric):
        lines = ["how sure that is cannot be said: one model alone was trained at full size"]
    return lines


def configuration(record: RunRecord) -> Facts:
    """Return the best configuration as texts; empty if no trial has a finite score."""
    if best_score(record)[1] is None:
        return {}
    return {name: show(value, 6) for name, value in record.trials[record.best_trial].used.items()}


def row(record: RunRecord, idle: float) -> list[str]:
    """Return the cells of a run in the list of runs: state, best score, metric, progress, trials, failed trials, time.

    A phone shows only the first cells. `idle` is the number of seconds since the run last wrote to its journal.
    """
    score, heat = best_score(record)
    best = "" if heat is None else show(score, 4) + f" ({heat})" * (heat != "race")
    metric, failed = f"{record.metric} ({record.mode})", sum(trial.status == "failed" for trial in record.trials)
    counts = [str(len(record.trials)), str(failed)]
    return [state_of(record), best, metric, progress_of(record, idle), *counts, duration(record.cost.seconds)]


def counts(record: RunRecord) -> str:
    """Say how many trials have each status; after an interruption, add how to resume the run."""
    found = Counter(trial.status for trial in record.trials)
    told = ", ".join(f"{count} {status}" for status, count in found.items())
    state = state_of(record)
    return f"{told}: {explained(state)}" if state == "interrupted" else told


def cost_facts(record: RunRecord) -> Facts:
    """Say the cost of the run in time and in full trainings, and the time that its surrogates saved."""
    cost = record.cost
    facts = {"wall time": both_units(record, cost.seconds)}
    for heat, (epochs, seconds) in by_heat(cost).items():
        facts[heat] = f"{counted(epochs, 'epoch')}: {both_units(record, seconds)}"
    if math.isfinite(whole := cost.full_trainings(1.0, record.max_t)):
        facts["full training"] = f"{counted(record.max_t, 'epoch')} at full size: about {duration(1 / whole)}"
    if cost.spared_seconds > 0:
        facts["spared"] = f"about {duration(cost.spared_seconds)} of full-size training, by surrogates (an estimate)"
    return facts


def failures(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return for each failed trial its number with the last line of its error, its configuration, and its traceback."""
    return [
        (
            f"trial {trial.trial}: {error_line(trial.error)}",
            ", ".join(f"{name}={show(value, 4)}" for name, value in trial.used.items()),
            trial.error or "",
        )
        for trial in record.trials
        if trial.status == "failed"
    ]


def environment(asked: Mapping[str, Any], units: Mapping[str, Any]) -> Facts:
    """Say on which machine and devices, with which versions, and for which data and model the run was made.

    `asked` is the content of its `run.json`, and `units` are those of its journal.
    """
    facts = {name: _words(value) for name, value in asked.get("environment", {}).items()}
    facts.setdefault("python", asked.get("python", ""))
    machines = dict.fromkeys(key.partition(" on ")[2] for key in units if WIDTHS_OF in key)
    facts |= {"measured on": "; ".join(machines), "training data": _words(asked.get("train_data"))}
    facts["validation data"] = _words(asked.get("val_data"))
    model = asked.get("model") or {}
    facts["model"] = counted(len(model), "parameter tensor") if model else ""
    return {name: value for name, value in facts.items() if value}


def _words(value: Any) -> str:
    value = jsonable(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return "" if value is None else str(value)


def call_of(asked: Mapping[str, Any]) -> str:
    """Write as Python the call of `tune` that `run.json` (`asked`) records.

    Values that JSON cannot hold, such as functions, become names.
    """
    digests = asked["digests"]
    own, sweep, race = recorded(asked)
    # Write metric and mode as the user gave them, which may be lists.
    own |= {"metric": asked["metric"], "mode": asked["mode"], "objectives": ()}
    default = SweepConfig()
    made = {"rule": asked["sweep_rule"], "searcher": asked["searcher"]}
    of_sweep = _changed(sweep, default)
    named = (*RULES, *SEARCHERS)
    given = {name: kind for name, kind in made.items() if kind not in (None, getattr(default, name))}
    of_sweep += [f"{name}={kind!r}" if kind in named else f"{name}={kind}(...)" for name, kind in given.items()]
    of_sweep += ["first=first"] if "first" in digests else []
    if "constraints" in digests:
        of_sweep = [told for told in of_sweep if not told.startswith("constraints=")] + ["constraints=constraints"]
    of_race = _changed(race, RaceConfig())
    val_data = asked["val_data"] if own.pop("folds") else "val_data"
    arguments = _changed(own, TuneConfig())
    arguments += [f"sweep=SweepConfig({', '.join(of_sweep)})"] if of_sweep else []
    arguments += [f"race=RaceConfig({', '.join(of_race)})"] if of_race else []
    arguments += ["metrics=metrics"] if "metrics" in digests else []
    function = "objective" if "objective" in digests else "loss_fn"
    passed = {"train_data": "train_data", "val_data": val_data, function: function}
    if "train" in digests:  # with a `train` function, the user may have given neither a loss nor data
        passed = {name: said for name, said in (passed | {"train": "train"}).items() if name in digests}
    lines = ["model_fn", _space(asked["space"], 1), *(f"{name}={said}" for name, said in passed.items()), *arguments]
    return "tune(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def _changed(given: Mapping[str, Any], defaults: object) -> list[str]:
    """Write as Python the arguments that differ from their defaults, and always `metric`, `mode`, sizes and seed."""
    said = ("metric", "mode", "num_samples", "max_t", "seed")
    changed = {name: value for name, value in given.items() if name in said or value != getattr(defaults, name)}
    return [f"{name}={value!r}" for name, value in changed.items()]


def _space(space: Any, depth: int) -> str:
    """Write a space, or a part of it, as Python. A list holds the branches of a `choice`."""
    if isinstance(space, list):
        return f"choice([{', '.join(_space(branch, depth) for branch in space)}])"
    if not isinstance(space, Mapping):
        return domain_of(str(space))
    indent = "    " * depth
    lines = [f"{indent}    {name!r}: {_space(words, depth + 1)},\n" for name, words in space.items()]
    return "{\n" + "".join(lines) + indent + "}"


def domain_of(words: str) -> str:
    """Write a domain, given in the words of `run.json`, as the Python call that makes it.

    >>> domain_of("float loguniform(0.0001, 1)"), domain_of("integer uniform(1, 5)"), domain_of("choice([32, 64])")
    ('loguniform(0.0001, 1)', 'randint(1, 5)', 'choice([32, 64])')
    """
    if (found := _NORMAL.fullmatch(words)) is not None:
        name = "randn" if found["q"] is None else "qrandn"
        return f"ray.tune.{name}({', '.join(filter(None, found.group('mean', 'sd', 'q')))})"
    if (found := RANGE.fullmatch(words)) is None:
        return words
    name = "uniform" if found["kind"] == "float" else "randint"
    name = "q" * (found["q"] is not None) + "log" * (found["law"] == "loguniform") + name
    home = "ray.tune." if found["kind"] == "integer" and name != "randint" else ""
    return f"{home}{name}({', '.join(filter(None, found.group('low', 'high', 'q')))})"
