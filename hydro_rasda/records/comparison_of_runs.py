"""Compare runs: the settings, results and costs in which they differ, and which run is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydro_rasda.history.lines import jsonable
from hydro_rasda.records.records import RunRecord, by_heat, flat
from hydro_rasda.records.report import IN_WORDS, best_score, state_of
from hydro_rasda.schedulers.ranking import rank

Asked = Mapping[str, Any]
"""A run's `run.json`; empty if its folder is gone."""

ValuesByRun = dict[str, list[Any]]
"""Maps a name to a list with one value for each run."""


_OF_CODE = ("code", "digests")


def compared(records: Sequence[RunRecord], asked: Sequence[Asked]) -> dict[str, ValuesByRun]:
    """Compare runs in four tables: results, and differences in best configuration, in settings, in code and data."""
    return {
        "found": _differing([*map(_found, records)], all_of=True),
        "best configuration": _differing([flat(record.best_config) for record in records]),
        "asked": _differing([flat({n: of for n, of in each.items() if n not in _OF_CODE}) for each in asked]),
        "code and data": _differing([each.get("digests", {}) for each in asked]),
    }


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """Return the names of the runs; if two runs have the same name, return their whole paths."""
    names = [record.path.name for record in records]
    return names if len({*names}) == len(names) else [str(record.path) for record in records]


def _found(record: RunRecord) -> dict[str, Any]:
    score, heat = best_score(record)
    return {
        "state": state_of(record),
        f"best {record.metric}": record.best_metric,
        **({f"best {record.metric} in the {IN_WORDS[heat]}": score} if heat in ("sweep", "middle") else {}),
        "best trial": record.best_trial if record.trials else None,
        "trials": len(record.trials),
        "failed or diverged": sum(trial.status in ("failed", "diverged") for trial in record.trials),
        **{f"epochs of the {IN_WORDS[heat]}": epochs for heat, (epochs, _) in by_heat(record.cost).items()},
        "seconds": record.cost.seconds,
    }


def _differing(each: Sequence[Mapping[str, Any]], all_of: bool = False) -> ValuesByRun:
    """Map each name whose value differs between runs to its value in each run; with `all_of`, map every name.

    An empty mapping in `each` stands for a run of which nothing is known. Such a run does not make a value differ.
    """
    plain = [jsonable(values) for values in each]
    known = [values for values in plain if values]
    rows = {name: [values.get(name) for values in plain] for values in plain for name in values}
    differ = {name for name in rows if any(values.get(name) != known[0].get(name) for values in known)}
    return {name: values for name, values in rows.items() if all_of or name in differ}


def verdict(records: Sequence[RunRecord], asked: Sequence[Asked]) -> str:
    """Say which run is better, if they can be compared."""
    first = records[0]
    measures = dict.fromkeys(f"{record.metric} ({record.mode})" for record in records)
    if len(measures) > 1:
        return f"not to be compared: {' and '.join(measures)}"
    if not all(asked):
        gone = [name for name, each in zip(names_of(records), asked, strict=True) if not each]
        return f"not to be compared: the folder of {' and '.join(gone)} is gone, which told the data and the loss"
    digests = [each.get("digests", {}) for each in asked]
    measured = [
        n for n in ("val_data", "loss_fn", "objective", "metrics") if len({each.get(n) for each in digests}) > 1
    ]
    if measured:
        return f"not to be compared: {' and '.join(measured)} differ"
    if any(record.best_metric != record.best_metric for record in records):
        return "not to be compared yet: one has no full-size model"
    named = [*zip(records, names_of(records))]
    order = [named[place] for place in rank([record.best_metric for record in records], first.mode)]
    (best, name), (second, _) = order[:2]
    if best.best_metric == second.best_metric:
        return f"{'both' if len(order) == 2 else 'the best two'} reached {first.metric} {best.best_metric:.6g}"
    others = " and ".join(f"{record.best_metric:.6g}" for record, _ in order[1:])
    told = "better" if len(order) == 2 else "best"
    return f"{name} is {told}: {first.metric} {best.best_metric:.6g} against {others}"
