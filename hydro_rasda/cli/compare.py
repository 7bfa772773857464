"""`compare`: the settings, results and costs in which two runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydro_rasda.cli.output import print_json, print_table, say
from hydro_rasda.results.reading import read_record
from hydro_rasda.results.records import RunRecord, flat, row
from hydro_rasda.results.report import state_of
from hydro_rasda.run.journal import jsonable
from hydro_rasda.run.spec import read_asked

_SECTIONS = ("found", "best configuration", "asked", "code and data")


def compare_runs(a: str, b: str, as_json: bool) -> None:
    """Print two runs beside each other."""
    pair = [(read_record(path), read_asked(Path(path).expanduser())) for path in (a, b)]
    (first, asked), (second, asked_too) = pair
    told = {
        "found": _differing(_found(first), _found(second), all_of=True),
        "best configuration": _differing(_configuration(first), _configuration(second)),
        "asked": _differing(flat(_settings(asked)), flat(_settings(asked_too))),
        "code and data": _differing(asked.get("digests", {}), asked_too.get("digests", {})),
    }
    verdict = _verdict(first, second, asked, asked_too)
    if as_json:
        print_json({"runs": [str(record.path) for record, _ in pair], **told, "verdict": verdict})
        return
    rows = [[section, name, *values] for section in _SECTIONS for name, values in told[section].items()]
    again = [i > 0 and rows[i - 1][0] == section for i, (section, *_) in enumerate(rows)]
    shown = [["" if same else each[0], *map(_short, each[1:])] for each, same in zip(rows, again, strict=True)]
    names = [record.path.name for record, _ in pair]
    print_table(["", "", *(names if len({*names}) == 2 else (a, b))], shown)
    say(verdict)


def _found(record: RunRecord) -> dict[str, Any]:
    cost = record.cost
    return {
        "state": state_of(record),
        f"best {record.metric}": record.best_metric,
        "best trial": record.best_trial if record.trials else None,
        "trials": len(record.trials),
        "failed or diverged": sum(trial.status in ("failed", "diverged") for trial in record.trials),
        "epochs of surrogates": cost.surrogate_epochs,
        "epochs at full size": cost.target_epochs,
        "seconds": cost.seconds,
    }


def _configuration(record: RunRecord) -> dict[str, Any]:
    best = row(record.trials[record.best_trial]) if record.trials else {}
    return {name.removeprefix("config/"): value for name, value in best.items() if name.startswith("config/")}


def _settings(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name != "digests"}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], all_of: bool = False) -> dict[str, list[Any]]:
    """Return both values of each name for which they differ; with `all_of`, of each name."""
    a, b = jsonable(a), jsonable(b)
    return {name: [a.get(name), b.get(name)] for name in {**a, **b} if all_of or a.get(name) != b.get(name)}


def _verdict(a: RunRecord, b: RunRecord, asked: Mapping[str, Any], asked_too: Mapping[str, Any]) -> str:
    """Say which run is better, if they can be compared."""
    if (a.metric, a.mode) != (b.metric, b.mode):
        return f"not to be compared: {a.metric} ({a.mode}) and {b.metric} ({b.mode})"
    digests = [each.get("digests", {}) for each in (asked, asked_too)]
    measured = [name for name in ("val_data", "loss_fn", "objective") if digests[0].get(name) != digests[1].get(name)]
    if measured:
        return f"not to be compared: {' and '.join(measured)} differ"
    difference = (a.best_metric - b.best_metric) * (1 if a.mode == "min" else -1)
    if difference != difference:
        return "not to be compared yet: one has no full-size model"
    if difference == 0:
        return f"both reached {a.metric} {a.best_metric:.6g}"
    better, worse = (b, a) if difference > 0 else (a, b)
    return f"{better.path.name} is better: {a.metric} {better.best_metric:.6g} against {worse.best_metric:.6g}"


def _short(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float)) else str(value)
