"""The timeline of a run, from its journal alone: when and where each training ran, and the best score over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.history.full_size import is_forgotten
from hydro_rasda.history.history import FULL_TRAINING, GROUP, heat_of, named_as_sweep
from hydro_rasda.history.lines import JournalLine, Unit, score_in
from hydro_rasda.records.records import RunRecord
from hydro_rasda.run.journal import JOURNAL, read_units


@dataclass(frozen=True)
class Training:
    """Trials that trained as one for a while, from epoch `start` to `stop`: a fused group, or a full-size model.

    `began` and `ended` are seconds of the run. `device` is None if the journal does not say. `lane` is a row of the
    device in a chart, counted from 0. Trainings at the same time have different lanes.
    """

    heat: HeatName
    trials: tuple[int, ...]
    start: int
    stop: int
    began: float
    ended: float
    device: int | None = None
    lane: int = 0


@dataclass(frozen=True)
class Best:
    """A score that was the best of its heat when it was recorded, at `seconds` of the run."""

    seconds: float
    score: float
    trial: int
    epoch: int


def journal_of(record: RunRecord) -> Mapping[str, Unit]:
    """Return a run's finished units of work, from its journal; an empty mapping if its folder is gone."""
    path = Path(record.path) / JOURNAL
    try:
        found = path.stat()
    except OSError:
        return read_units(path).units
    return _units(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4)
def _units(path: Path, size: int, written: int) -> Mapping[str, Unit]:
    """Return the units of a journal, cached until its size or time of writing changes, as several figures need them."""
    return read_units(path).units


def trainings(units: Mapping[str, Unit]) -> list[Training]:
    """Return a run's trainings, those of groups and of full-size models, in the order in which they began."""
    found = sorted(_trainings(units), key=lambda each: (each.began, each.ended, each.trials))
    free: dict[int | None, list[float]] = {}
    placed = []
    for each in found:
        lanes = free.setdefault(each.device, [])
        # A lane is free even if its training seems to end a moment later, because ends are recorded late.
        slack = 0.02 * (each.ended - each.began)
        lane = next((i for i, until in enumerate(lanes) if until <= each.began + slack), len(lanes))
        lanes[lane : lane + 1] = [each.ended]
        placed.append(replace(each, lane=lane))
    return placed


def _trainings(units: Mapping[str, Unit]) -> Iterator[Training]:
    reached: dict[int, int] = {}
    for key, unit in units.items():
        heat = heat_of(key)
        if heat != "race" and (name := GROUP.fullmatch(named_as_sweep(key))) is not None:
            value, began = unit.value, max(0.0, unit.at - unit.seconds)
            for group in value["groups"] or [value["members"]]:
                start, stop = int(name["start"]), int(value["stop"])
                yield Training(heat, tuple(group), start, stop, began, unit.at, value.get("device"))
        elif (name := FULL_TRAINING.fullmatch(key)) and name["what"] == "to" and not unit.value.get("swept"):
            trial, stop, value = int(name["trial"]), int(name["epoch"]), unit.value
            began = max(0.0, unit.at - unit.seconds * value.get("beside", 1))
            yield Training("race", (trial,), reached.get(trial, 0), stop, began, unit.at, value.get("device"))
            reached[trial] = stop


def busy_share(trained: Sequence[Training]) -> float:
    """Return the share of the time from first begin to last end in which a training ran; NaN without trainings."""
    if not trained:
        return math.nan
    busy, until = 0.0, -math.inf
    for each in sorted(trained, key=lambda each: each.began):
        busy += max(0.0, each.ended - max(each.began, until))
        until = max(until, each.ended)
    span = until - min(each.began for each in trained)
    return busy / span if span else 1.0


def best_over_time(units: Mapping[str, Unit], record: RunRecord) -> dict[HeatName, list[Best]]:
    """List, by heat, each score that was better than all before, at the time when its unit of work was recorded."""
    sign = 1 if record.mode == "min" else -1
    found: dict[HeatName, list[Best]] = {}
    for at, line in sorted(_epochs(units, record.ended), key=lambda told: told[0]):
        if (value := score_in(line, record.metric)) is None:
            continue
        so_far = found.setdefault(line["heat"], [])
        if not so_far or sign * value < sign * so_far[-1].score:
            so_far.append(Best(at, value, line["trial"], line["epoch"]))
    return found


def _epochs(units: Mapping[str, Unit], ended: bool) -> Iterator[tuple[float, JournalLine]]:
    """Yield for each epoch the time at which it was recorded, and its line in the journal.

    If a full-size trial failed, the epochs after its last checkpoint are left out. If a trial began early at full size
    and then did not enter the race, all its full-size epochs are left out. While the run goes on, epochs since the last
    checkpoint are yielded, too.
    """
    live: dict[str, list[tuple[float, JournalLine]]] = {}
    for key, unit in units.items():
        lines = [(unit.at, line) for line in unit.lines if line["event"] == "metrics"]
        if (name := FULL_TRAINING.fullmatch(key)) is None:
            yield from lines
        elif name["what"] == "at":
            live.setdefault(name["trial"], []).extend(lines)
        else:
            before = live.pop(name["trial"], [])
            if not is_forgotten(units, int(name["trial"]), unit):
                yield from [*before, *lines] if name["what"] == "to" else lines
    if not ended:
        yield from (told for of_trial in live.values() for told in of_trial)
