"""Functions that answer questions about the race of a run, the training at full size, from the run's history.

A unit is the journal's record of one finished piece of work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from hydro_rasda.history.history import DONE, ENTERED, FULL_TRAINING, History, Live
from hydro_rasda.history.lines import Unit
from hydro_rasda.history.scores import deciding_curve, done_early, kept_of
from hydro_rasda.schedulers import ExpectedEnd, Race
from hydro_rasda.schedulers.ranking import ranked

ENDED = "race/ended-by-"
BY_SCORE = f"{ENDED}score-"

RunEnd = Literal["finished", "out of time", "open"]


def race_of(history: History) -> Race:
    """Return the race rule that the settings of a run ask for."""
    asked = history.settings
    budget = asked.full_trainings / asked.models("race")
    return Race(asked.max_t, asked.mode, asked.race.reduction_factor, budget)


def end_score(history: History, number: int) -> float:
    """Return the score by which a full-size trial is compared with other trials at their ends.

    It is the last score of `deciding_curve`. With several metrics, it is the score of the kept weights, by which the
    Pareto front is made.
    """
    several = history.settings.comparison.several
    return kept_of(history, number)[1] if several else [*deciding_curve(history, number).values()][-1]


def expected_ends(history: History, numbers: Iterable[int]) -> dict[int, ExpectedEnd]:
    """Estimate the final scores of trials that began at full size, including trials that failed."""
    began = [n for n in numbers if history.epochs("race", n)]
    full = {n: {} if history.has_failed("race", n) else deciding_curve(history, n, with_averages=False) for n in began}
    ends = {n: end_score(history, n) for n in began if at_the_end(history, n)}
    found = race_of(history).expected_ends(full, [n for n in began if done_early(history, n)], ends)
    none_ended = not any(at_the_end(history, n) for n in began)
    for n in began if history.settings.race.keep == "best" and none_ended else ():
        if not math.isfinite(history.score("race", n)) and n in history.best:
            _, best = history.best[n]
            found[n] = ExpectedEnd(best, 0.0)
    return found


def at_the_end(history: History, number: int) -> bool:
    """Tell whether a full-size training has come to its end with a finite score.

    It ends at the last epoch, or earlier if it stops by itself (`done_early`).
    """
    if history.has_failed("race", number) or not math.isfinite(history.score("race", number)):
        return False
    return history.epochs("race", number) >= history.settings.max_t or done_early(history, number)


def tried_targets(history: History, finalists: Sequence[int]) -> list[int]:
    """Return the finalists, and all other trials that were trained at full size."""
    return [*finalists, *sorted({n for heat, n in history.metrics if heat == "race"} - set(finalists))]


def trained_spans(units: Mapping[str, Unit]) -> Iterator[tuple[int, Unit]]:
    """Yield a trial and its unit for each checkpoint at full size.

    The unit has the lines of all epochs that the trial trained since its checkpoint before.
    """
    live: dict[int, Live] = {}
    for key, unit in units.items():
        if (name := FULL_TRAINING.fullmatch(key)) is None:
            continue
        number, epoch = int(name["trial"]), int(name["epoch"])
        if name["what"] == "at":
            live.setdefault(number, Live()).take(epoch, unit.lines)
            continue
        before = live.pop(number, Live())
        if name["what"] == "to" and not is_forgotten(units, number, unit):
            yield number, before.joined(unit, epoch)


def is_forgotten(units: Mapping[str, Unit], number: int, unit: Unit) -> bool:
    """Tell whether a unit does not count: it records an early full-size training of a trial that entered no race."""
    if not (unit.value or {}).get("early"):
        return False
    return not any(number in entered.value for key, entered in units.items() if key.startswith(ENTERED))


def refit_key(number: int, epoch: int) -> str:
    """Return the name of the unit that trains a trial's model again up to this epoch, and of the unit's checkpoint."""
    return f"race/refit-{number}/to-{epoch}"


def run_end(history: History) -> RunEnd:
    """Tell how a run has ended, or that it is open. Results, command line and pages all use this function.

    Once finalists are chosen, the last record of the race decides. The run has finished if this record ends the race of
    these finalists, or says that a score is good enough. It stays finished if samples that were added later did not
    change the finalists. A run has also finished if its very last record says that a score is good enough. Otherwise,
    it is out of time if its very last record ends the race.
    """
    chosen, last = history.at_full_size, history.last_of_race
    if chosen is not None and (is_race_over(history, chosen) or last.startswith(BY_SCORE)):
        return "finished"
    if history.last == last and last.startswith(BY_SCORE):
        return "finished"
    return "out of time" if history.last == last and last.startswith((DONE, ENDED)) else "open"


def found_enough(history: History) -> bool:
    """Tell whether a full-size model of the race has reached `stop_at`."""
    return any(history.settings.good_enough(score) for _, score in history.best.values())


def found_early(history: History) -> list[int]:
    """Return the trials whose full-size models reached `stop_at` while a heat on surrogates goes on, best first.

    These models began early, or an earlier call with fewer configurations trained them. Once finalists are chosen,
    return an empty list.
    """
    if history.settings.stop_at is None or history.at_full_size is not None:
        return []
    kept = {number: score for number, (_, score) in history.best.items()}
    units = {number: unit.value for number, (_, unit) in history.early.items()}
    kept |= {number: value["best"]["score"] for number, value in units.items() if "best" in value}
    return [number for number in ranked(kept, history.settings.mode) if history.settings.good_enough(kept[number])]


def score_that_ended(key: str) -> float | None:
    """Return the value of `stop_at` by which the unit of this name ended the run; None if it is another unit."""
    return float(key.removeprefix(BY_SCORE)) if key.startswith(BY_SCORE) else None


def is_race_over(history: History, finalists: Iterable[int]) -> bool:
    """Tell whether the last record of the race says that it has ended with these finalists."""
    return history.last_of_race == DONE and history.over == sorted(finalists)
