"""The commands `trials` and `best`: filter and sort a run's trials, and print the best configuration."""

from __future__ import annotations

import csv
import json
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydro_rasda.cli.output import print_json, print_table, say, trial_values
from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.console import one_line
from hydro_rasda.common.short_values import numbers_first, show
from hydro_rasda.history.lines import jsonable
from hydro_rasda.records.record_from_journal import read_record
from hydro_rasda.records.records import COLUMNS, RunRecord, TrialRecord, in_heat, row
from hydro_rasda.records.report import best_first, best_score, varied

if TYPE_CHECKING:
    from hydro_rasda.results.result import TuneResult


def print_best(path: str, style: str, trial: int | None, export: str | None, recipe: bool = False) -> bool:
    """Print the configuration or recipe of a trial. None is the best; then return False if no trial has a score yet."""
    record = read_record(path)
    if trial is None and best_score(record)[1] is None:
        return False
    number = record.best_trial if trial is None else trial
    known = len(record.trials)
    require(0 <= number < known, "--trial", number, f">= 0 and < {known}, the number of the run's trials")
    found = record.trials[number]
    if export is not None:
        # Export before anything is printed: if it fails, stdout must be empty.
        say(f"wrote {_loaded(path).save_model(export, number)}", error=True)
    if recipe:
        loop = _loaded(path).recipe(number)
        if style == "json":
            print_json({"trial": number, "recipe": loop})
        else:
            say(loop, end="")
    else:
        say(written(found.config, style, one_line(comment(record, found))), end="")
    return True


def _loaded(path: str) -> TuneResult:
    from hydro_rasda.results.result import load  # imported only here, because it imports torch

    return load(path)


def comment(record: RunRecord, trial: TrialRecord) -> str:
    """Describe a trial's score in one line, for the comment above its printed configuration."""
    if trial.epochs:
        told = f"{show(trial.metric, 6)} ({record.mode}) at full size, epoch {trial.kept_epoch} of {trial.epochs}"
    elif trial.sweep_epochs:
        score, epochs = in_heat(trial, "middle" if trial.middle_epochs else "sweep")
        told = f"{show(score, 6)} ({record.mode}) on its surrogate, epoch {epochs}"
    else:
        told = "none, as it failed" if trial.status == "failed" else "not known yet"
    unread = f"; nothing reads {', '.join(trial.unread)}" if trial.unread else ""
    return f"trial {trial.trial} of {record.path.name}: {record.metric} {told}{unread}"


def written(config: Mapping[str, Any], style: str, comment: str) -> str:
    """Write a configuration as text, in the style "json", "yaml" or "python". YAML and Python begin with a comment."""
    if style == "json":
        return json.dumps(jsonable(config), indent=2) + "\n"
    if style == "python":
        entries = "".join(f"    {name!r}: {value!r},\n" for name, value in _plain(config, _Expression).items())
        return f"# {comment}\nconfig = {{\n{entries}}}\n"
    import yaml

    return f"# {comment}\n{yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)}"


class _Expression(float):
    """A float whose `repr` is a Python expression even if it is infinite or NaN."""

    def __repr__(self) -> str:
        return super().__repr__() if math.isfinite(self) else f'float("{float(self)}")'


def _plain(value: Any, number: type[float] = float) -> Any:
    """Return a value as `jsonable` does, but keep NaN, infinities and tuples."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, number) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, number) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return number(value) if isinstance(value, float) else jsonable(value)


TrialRow = Mapping[str, Any]

_PREFIX = "config/"
_CONDITION = re.compile(r"\s*(?P<name>[^<>=!]+?)\s*(?P<sign><=|>=|!=|==|=|<|>)\s*(?P<value>.*?)\s*")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


def list_trials(
    path: str, where: Sequence[str], sort: str | None, reverse: bool, limit: int | None, as_csv: bool, as_json: bool
) -> None:
    """Print the trials that meet all conditions."""
    require(not (as_csv and as_json), "--csv", True, "left out where --json is given")
    record = read_record(path)
    ordered = best_first(record)
    rows = [jsonable(row(trial, record.others)) for trial in ordered]
    columns = list(dict.fromkeys(name for each in rows for name in each)) or [*COLUMNS]
    rows = filtered(rows, columns, where)
    if sort is not None:
        rows = sorted_by(rows, column("--sort", sort, columns), reverse)
    elif reverse:
        rows = rows[::-1]
    rows = rows[:limit]
    if as_json:
        by_number = {trial.trial: trial_values(trial) for trial in ordered}
        print_json([by_number[each["trial"]] for each in rows])
    elif as_csv:
        told = [columns, *([each.get(name) for name in columns] for each in rows)]
        if sys.stdout.isatty():  # escape values only for people; a program gets the raw ones
            told = [["" if value is None else one_line(value) for value in each] for each in told]
        csv.writer(sys.stdout, lineterminator="\n").writerows(told)
    else:
        _print(rows, columns, record)


def filtered(rows: Sequence[TrialRow], columns: Sequence[str], where: Sequence[str]) -> list[TrialRow]:
    """Return the rows that meet all conditions, such as "lr<0.01". A missing value meets only `!=`."""
    kept = list(rows)
    for condition in where:
        found = _CONDITION.fullmatch(condition)
        if found is None:
            rule = f"a column, one of {' '.join(_SIGNS)}, and a value"
            raise ValueError(f"a condition `--where` is {condition!r}, but must be {rule}")
        name, holds, value = column("--where", found["name"], columns), _SIGNS[found["sign"]], _value(found["value"])
        rule = f"a column, {found['sign']}, and a number"
        ordered = found["sign"] in ("=", "==", "!=") or isinstance(value, (int, float))
        require(ordered, "--where", condition, rule)
        kept = [each for each in kept if _meets(each.get(name), holds, value, found["value"])]
    return kept


def _meets(own: Any, holds: Callable[[Any, Any], bool], value: Any, text: str) -> bool:
    try:
        # Accept a value as JSON has it (true, "1"), and also as the table shows it (True, 1).
        return holds(own, own if str(own) == text else value)
    except TypeError:  # values without an order: "sgd" < 3, None > 1
        return False


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # JSON does not allow .01
        return float(text) if _NUMBER.fullmatch(text) else text


def sorted_by(rows: Sequence[TrialRow], name: str, reverse: bool) -> list[TrialRow]:
    """Sort rows by a column: numbers before words. Missing values come last, even if reversed."""
    there = [each for each in rows if each.get(name) is not None]
    ordered = sorted(there, key=lambda each: numbers_first(each[name]), reverse=reverse)
    return ordered + [each for each in rows if each.get(name) is None]


def column(option: str, name: str, columns: Sequence[str]) -> str:
    """Return the column's full name: `name`, or "config/" before `name`. An error names the command's `option`."""
    found = name if name in columns else _PREFIX + name
    short = [each.removeprefix(_PREFIX) for each in columns]
    require(found in columns, option, name, f"one of {short}")
    return found


def _print(rows: Sequence[TrialRow], columns: Sequence[str], record: RunRecord) -> None:
    """Print a table with the hyperparameters that differ between trials; below it, print the other hyperparameters.

    A cell is empty if nothing reads the hyperparameter in that trial.
    """
    used, differ = {trial.trial: trial.used for trial in record.trials}, varied(record)
    names = [name.removeprefix(_PREFIX) for name in columns if name.startswith(_PREFIX)]
    headings = {
        "trial": "trial",
        "status": "status",
        "sweep_metric": "sweep",
        "sweep_epochs": "epochs",
        **({"middle_metric": "middle", "middle_epochs": "epochs"} if "middle_epochs" in columns else {}),
        "metric": "race",
        "epochs": "epochs",
        **({"spread": "± over models"} if "spread" in columns else {}),
        **{name: name for name in record.others},
    }
    # A count of 0 epochs is shown as an empty cell.
    shown = [{name: value for name, value in each.items() if value != 0 or "epochs" not in name} for each in rows]
    cells = [
        [*(each.get(name) for name in headings), *(used[each["trial"]].get(name) for name in differ)] for each in shown
    ]
    print_table([*headings.values(), *differ], cells)
    if alike := [name for name in names if name not in differ]:
        first = record.trials[0].used
        told = ", ".join(f"{name}={show(first[name], 4)}" if name in first else f"{name} (not read)" for name in alike)
        say(f"in all trials: {told}")
