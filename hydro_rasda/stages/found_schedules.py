"""Finalists of a population: they train at full size by the schedules that it found, and beside them a linear decay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from fusion.hyperparameters import read
from hydro_rasda.results.lineage import SCHEDULES, lineages, schedule_of, smoothed
from hydro_rasda.run.journal import Unit
from hydro_rasda.run.state import Run, decision_key
from hydro_rasda.trial import Trial

LINEAR: Mapping[str, Any] = {"schedule": "linear", "decay_start": 0.0, "floor": 0.0}


def by_found_schedules(run: Run, finalists: Sequence[int]) -> tuple[list[int], list[str]]:
    """Give the finalists of a population the schedules of their lineages, smoothed and stretched to `max_t`.

    Beside each, the same configuration races with a linear decay, so that a schedule which does not transfer costs
    little. Both are trials of their own, which the sweep did not train. There are `top_k` finalists as before, of half
    as many lineages. Finalists of a sweep that copied no trial stay as they are. So do those of a sweep at full width,
    whose training goes on, and those that a function of the user's trains: it knows no schedule.

    Returns:
        The finalists, and what the user is to be told of them.
    """
    found = lineages(run.store.units(), {number: run.epochs("surrogate", number) for number in run.trials})
    if not any(len(of) > 1 for of in found.values()):
        return list(finalists), []
    if run.settings.sweep.surrogate == 1 or run.problem.full_size is not None:
        changed = ", ".join({key: None for number in finalists for key in schedule_of(found[number])})
        line = f"finalists go on with their last values of {changed}: `best_schedule` has the earlier ones"
        return list(finalists), [line] if changed else []

    def decided() -> Unit:
        entrants = [(of, changes) for of in finalists for changes in _variants(run, of, smoothed(found[of]))]
        new = count(len(run.trials))
        racing = entrants[: run.settings.race.top_k]
        value: list[list[Any]] = [[next(new) if changes else of, of, changes] for of, changes in racing]
        lines = [
            {"event": "trial", "trial": number, "config": {**run.trials[source].config, **changes}, "unread": {}}
            for number, source, changes in value
            if changes
        ]
        return Unit(value, lines)

    told: list[str] = []
    unit = run.unit(decision_key(SCHEDULES, run.trials), decided)
    for number, source, changes in unit.value:
        run.trials[number] = Trial(number, {**run.trials[source].config, **changes})
        run.unread[number] = run.unread.get(source, frozenset())
        if changes:
            how = "with a linear decay" if changes.items() >= LINEAR.items() else "by its schedule, smoothed"
            told.append(f"trial {number} trains as trial {source} did, {how}: {_shown(changes)}")
    return [number for number, _, _ in unit.value], told


def _variants(run: Run, number: int, changes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield dict(changes)
    if read(run.trials[number].config, "schedule") == "constant":
        yield {**changes, **LINEAR}


def _shown(changes: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in changes.items()
    )
