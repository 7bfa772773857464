"""The full-size stage, as the journal keeps it.

All backends record full-size trainings alike, so that each can resume the work of another:

- `target/trial-{n}/to-{epoch}`: a trial's metrics since its unit before, and `{"checkpoint": name}` from which training
  can go on after this epoch. "best" tells the epoch whose weights it keeps. "swept" tells that the sweep trained it:
  the sweep's metrics up to there are then the trial's own. "device" is the device, if there are several. "beside" is
  the number of trials that shared it, the trial included.
- `target/trial-{n}/failed-after-{epoch}`: its traceback.
- `target/trial-{n}/done-after-{epoch}`: its training has ended by itself, before the last epoch.
- `target/to-{epoch}/kept/of-{trials}`: for each trial that was compared after this epoch, the epoch to which it trains
  on, or None; nothing at the end of a training.
- `target/refit-{n}/to-{epoch}`: a trial's model of that epoch, trained once more on the examples of all folds.
- `target/done`: the stage is over, for the finalists that it names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from hydro_rasda.config import Mode, averaged, unaveraged
from hydro_rasda.run.events import TrialEnded
from hydro_rasda.run.journal import JournalLine, Unit
from hydro_rasda.run.locks_and_crashes import DROPPED
from hydro_rasda.run.state import FINALISTS, Run, decision_key, failure_line, retry_key
from hydro_rasda.schedulers import ExpectedEnd, Race, final_score, rank

DONE = "target/done"
_ENDED = "target/ended-by-"
_KINDS, _WIDTHS = "surrogate/kinds-from-", "surrogate/widths-of-"
_BY_SCORE = f"{_ENDED}score-"

RunEnd = Literal["finished", "out of time", "open"]

_UNIT = re.compile(r"target/trial-(?P<trial>\d+)/(?P<what>to|failed-after|done-after)-(?P<epoch>\d+)")
_REFIT = re.compile(r"target/refit-(?P<trial>\d+)/to-\d+")
_KEPT = re.compile(r"target/to-(\d+)/kept.*")


def race_of(run: Run) -> Race:
    """Return the rule that the settings of a run ask for."""
    asked = run.settings
    budget = asked.full_trainings / asked.models("target")
    return Race(asked.max_t, asked.mode, asked.race.reduction_factor, budget)


def deciding_curve(run: Run, number: int, *, with_averages: bool = True) -> dict[int, float]:
    """Return the scores by which a full-size trial is compared, by epoch.

    With `keep="best"`, a trial hands back its best epoch, but trials are compared by their last epochs. A user who
    trains the winner's configuration again, elsewhere or on more data, gets the last epoch. If weights are averaged,
    the curve is of the unaveraged ones, at the epochs at which these were validated as well. In the end, averages
    count, too (`final_score`), unless there are several metrics. The best epoch so far counts if training ends by early
    stopping (`patience`), or by a user's function that returns before the end.

    Args:
        with_averages: False to leave averages out in the end, too.
    """
    settings, curve = run.settings, run.curve("target", number)
    if settings.race.keep == "best" and (settings.race.patience is not None or done_early(run, number)):
        return dict(zip(curve, accumulate(curve.values(), partial(_better, mode=settings.mode))))
    found = dict[int, float]()
    for line in run.metrics.get(("target", number), ()):
        if (name := unaveraged(settings.metric)) in line:
            score = run.score_of(line, name)
            if with_averages and line["epoch"] == settings.max_t and not settings.comparison.by_place:
                score = final_score(score, run.score_of(line), next(iter(curve.values())), settings.mode)
            found[line["epoch"]] = score
        elif averaged(settings.metric) in line:
            found[line["epoch"]] = run.score_of(line)
    return found or curve


def end_score(run: Run, number: int) -> float:
    """Return the score by which a full-size trial that came to its end is compared with others there.

    It is the last of `deciding_curve`. With several metrics, it is that of the kept weights, as in the front.
    """
    several = run.settings.comparison.several
    return kept_of(run, number)[1] if several else [*deciding_curve(run, number).values()][-1]


def kept_of(run: Run, number: int) -> tuple[int, float]:
    """Return the full-size epoch whose weights count, and the metric after it.

    A trial's best epoch counts even if it diverged or raised later.
    """
    score = run.score("target", number)
    last = run.epochs("target", number), score
    return run.best.get(number, last) if run.settings.race.keep == "best" or math.isfinite(score) else last


def averages_at(run: Run, stop: int, numbers: Iterable[int]) -> dict[int, float]:
    """Return the scores of averaged weights after an epoch, of trials that have some and are compared by others."""
    lines = {n: line for n in numbers for line in run.metrics.get(("target", n), ()) if line["epoch"] == stop}
    return {n: run.score_of(line) for n, line in lines.items() if unaveraged(run.settings.metric) in line}


def averages_lost(lines: Iterable[Mapping[str, Any]], epoch: int, metric: str) -> bool:
    """Tell whether averaged weights were worse after an epoch than those that training left, which count then."""
    return any(averaged(metric) in line for line in lines if line["epoch"] == epoch)


def places_at(run: Run, stop: int, scores: Mapping[int, float]) -> dict[int, float]:
    """Return the places of full-size trials at a milestone by all that they are compared by."""
    values = {n: run.values_at("target", n, stop, suffix=unaveraged("")) for n in scores}
    return run.settings.comparison.places({n: of | {run.settings.metric: scores[n]} for n, of in values.items()})


def _better(one: float, other: float, mode: Mode) -> float:
    return (one, other)[rank((one, other), mode)[0]]


def expected_ends(run: Run, numbers: Iterable[int]) -> dict[int, ExpectedEnd]:
    """Estimate how trials that began at full size will end, those that failed included."""
    began = [n for n in numbers if run.epochs("target", n)]
    full = {n: {} if n in run.failures else deciding_curve(run, n, with_averages=False) for n in began}
    ends = {n: end_score(run, n) for n in began if at_the_end(run, n)}
    found = race_of(run).expected_ends(full, [n for n in began if done_early(run, n)], ends)
    none_ended = not any(at_the_end(run, n) for n in began)
    for n in began if run.settings.race.keep == "best" and none_ended else ():
        if not math.isfinite(run.score("target", n)) and n in run.best:
            _, best = run.best[n]
            found[n] = ExpectedEnd(best, 0.0)
    return found


def at_the_end(run: Run, number: int) -> bool:
    """Tell whether a full-size training ended with a finite score: at its last epoch, or earlier by itself."""
    if number in run.failures or not math.isfinite(run.score("target", number)):
        return False
    return run.epochs("target", number) >= run.settings.max_t or done_early(run, number)


def recall_targets(run: Run) -> None:
    """Take in the records of the full-size stage, of any backend; it may be called again.

    Remove checkpoints that later ones replaced: the process that wrote the later ones may have been killed before it
    did.
    """
    run.store.discard(take_in_targets(run))


def take_in_targets(run: Run) -> list[str]:
    """Take in the same records without removing a file; return the checkpoints that later ones replaced."""
    run.checkpoints.clear()  # else the last of them would seem to come before the first
    replaced: dict[str, None] = {}
    for key in run.store.units():
        if (name := _UNIT.fullmatch(key)) is not None:
            unit = run.recall(key)
            if name["what"] == "to":
                replaced |= dict.fromkeys(_advance(run, int(name["trial"]), unit))
        elif (name := _REFIT.fullmatch(key)) is not None:
            replaced |= dict.fromkeys(run.refits.values())
            run.refits = {int(name["trial"]): key}
    return [name for name in replaced if name not in (*run.checkpoints.values(), *run.refits.values())]


def decided_targets(run: Run) -> dict[int, bool]:
    """Tell, for each full-size trial at an epoch with a decision, whether it goes on."""
    decided: dict[int, bool] = {}
    reached: dict[int, int] = {}
    for key, unit in run.store.units().items():
        if (name := _UNIT.fullmatch(key)) is not None:
            number = int(name["trial"])
            if name["what"] == "to":
                reached[number] = int(name["epoch"])
                decided.pop(number, None)
            elif name["what"] == "done-after":
                decided[number] = False
        elif (decision := _KEPT.fullmatch(key)) is not None:
            there = [number for number, epoch in reached.items() if epoch == int(decision[1])]
            decided |= {number: to is not None for number, to in unit.value if number in there}
    return decided


def tried_targets(run: Run, finalists: Sequence[int]) -> list[int]:
    """Return the finalists, and all other trials that were trained at full size."""
    return [*finalists, *sorted({n for stage, n in run.metrics if stage == "target"} - set(finalists))]


def source_of(run: Run, number: int) -> str | None:
    """Return the checkpoint from which a full-size trial goes on; None if it begins anew. Damage is reported."""
    name = run.checkpoints.get(number)
    if name is not None and (damage := run.store.damage(name)):
        run.say(f"{damage}: trial {number} trains again")
        del run.checkpoints[number]
        run.best.pop(number, None)
        run.metrics.pop(("target", number), None)
        return None
    return name


def record_epochs(
    run: Run,
    number: int,
    lines: Sequence[JournalLine],
    state: Mapping[str, Any],
    seconds: float = 0.0,
    *,
    epoch: int | None = None,
    **more: Any,
) -> None:
    """Record epochs of a full-size trial: first the checkpoint, then the journal's lines.

    Args:
        lines: The trial's metrics since its last record, or from an earlier epoch on if it went back.
        epoch: The epoch that was reached; None: that of the last line.
    """
    key = f"target/trial-{number}/to-{lines[-1]['epoch'] if epoch is None else epoch}"
    run.save(key, state, [number])
    if "best" in state:
        more["best"] = {name: state["best"][name] for name in ("epoch", "score")}
    value = {"checkpoint": key, **more}
    run.store.discard(_advance(run, number, run.record(key, Unit(value, list(lines), seconds), again=True)))


def record_swept(run: Run, number: int, state: Mapping[str, Any]) -> None:
    """Record the sweep's training of a trial, at full width, as the beginning of its full-size training."""
    record_epochs(run, number, [], state, epoch=run.epochs("surrogate", number), swept=True)


def recorded_epochs(run: Run, number: int) -> int:
    """Return the last recorded epoch of a trial's full-size training, whether it was taken in or not."""
    names = [name for key in run.store.units() if (name := _UNIT.fullmatch(key)) and int(name["trial"]) == number]
    return max((int(name["epoch"]) for name in names), default=0)


def refit_key(number: int, epoch: int) -> str:
    """Return the name of the unit that trains a trial's model once more, to this epoch, and of its checkpoint."""
    return f"target/refit-{number}/to-{epoch}"


def record_refit(run: Run, number: int, epoch: int, state: Mapping[str, Any], seconds: float) -> None:
    """Record a model that was trained once more; an earlier one goes."""
    key = refit_key(number, epoch)
    run.save(key, state, [number])
    run.record(key, Unit({"epochs": epoch}, [], seconds), again=True)
    before, run.refits = run.refits, {number: key}
    run.store.discard({*before.values()} - {key})


def record_failure(run: Run, number: int, error: str, seconds: float = 0.0) -> None:
    """Record that a full-size trial raised, with its traceback."""
    line = failure_line(number, error)
    key = f"target/trial-{number}/failed-after-{run.epochs('target', number)}"
    run.record(key, Unit(None, [line], seconds), again=True)


def record_done(run: Run, number: int) -> None:
    """Record that the training of a full-size trial has ended by itself: it does not go on."""
    epoch = run.epochs("target", number)
    key = f"target/trial-{number}/done-after-{epoch}"
    if epoch < run.settings.max_t and not run.store.done(key):
        run.store.record(key, Unit(None))
        run.notify(TrialEnded, trial=number, epoch=epoch)


def done_early(run: Run, number: int) -> bool:
    """Tell whether the training of a full-size trial has ended by itself before the last epoch."""
    return run.store.done(f"target/trial-{number}/done-after-{run.epochs('target', number)}")


def run_end(run: Run) -> RunEnd:
    """Tell whether nothing trains any more; this function alone decides it, for results, command line and pages.

    A run has finished if its sweep has chosen finalists among all its trials, and if the last record of the full-size
    stage says one of two things. The stage is over for these finalists, or a score is good enough. Samples that were
    added to a run may leave both as they were. Otherwise, a run is out of time if its last record is an end.
    """
    units, last = run.store.units(), _last_target(run)
    sweep = units.get(decision_key(FINALISTS, run.trials))
    if sweep is not None and (targets_over(run, sweep.value) or last.startswith(_BY_SCORE)):
        return "finished"
    return "out of time" if next(reversed([*units]), "") == last and last.startswith((DONE, _ENDED)) else "open"


def found_enough(run: Run) -> bool:
    """Tell whether a full-size model is as good as `stop_at` asks."""
    return any(run.settings.good_enough(score) for _, score in run.best.values())


def end_by_score(run: Run) -> None:
    """Record, and say, that a score is good enough; the same call with another `stop_at` goes on."""
    run.end_by(f"{_BY_SCORE}{run.settings.stop_at}")
    run.say(f"{run.settings.metric} is as good as `stop_at={run.settings.stop_at}` asks: nothing more trains")


def score_that_ended(run: Run) -> float | None:
    """Return the `stop_at` that ended the run; None if something else did, or if it has gone on since."""
    last = _last_target(run)
    return float(last.removeprefix(_BY_SCORE)) if last.startswith(_BY_SCORE) else None


def targets_over(run: Run, finalists: Iterable[int]) -> bool:
    """Tell whether the stage has ended with these finalists, and none has gone on since."""
    return _last_target(run) == DONE and run.store.units()[DONE].value == sorted(finalists)


def _last_target(run: Run) -> str:
    """Return the key of the journal's last unit of the full-size stage."""
    return next((key for key in reversed([*run.store.units()]) if key.startswith("target/")), "")


def end_targets(run: Run, finalists: Iterable[int]) -> None:
    """Record that the stage has come to its end with these finalists."""
    run.end_by(DONE, sorted(finalists))


def try_dropped_again(run: Run) -> None:
    """Take back what was dropped because this library's own process died of it, and the decisions that rest on it."""
    units = run.store.units()

    def dropped(line: JournalLine) -> bool:
        return str(line.get("error", "")).startswith(DROPPED)

    found = {key: of for key, unit in units.items() if (of := [line["trial"] for line in unit.lines if dropped(line)])}
    # These units hold the configurations of all trials, which stay as they are.
    built = [n for key, of in found.items() if key.startswith(_KINDS) for n in of if retry_key(n) not in units]
    keys = [key for key in found if not key.startswith(_KINDS)]
    if numbers := sorted({*built, *(n for key in keys for n in found[key])}):
        run.say(f"trials {', '.join(map(str, numbers))} are tried again, as `resume` is 'changed'")
        keys += [key for key in units if key == DONE or key.startswith(f"{FINALISTS}/")]
    # Processes may have died of measuring these.
    keys += [key for key, unit in units.items() if key.startswith(_WIDTHS) and unit.value.get("assumed")]
    run.store.forget(keys)
    for number in built:
        run.store.record(retry_key(number), Unit(None, [{"event": "retried", "trial": number}]))


def another_chance(run: Run, finalists: Iterable[int]) -> bool:
    """Try failed finalists again if code or data changed since; return whether there are any."""
    again = [n for n in finalists if n in run.failures and run.store.changes]
    for number in again:
        del run.failures[number]
    return bool(again)


def ended_early(run: Run, number: int) -> bool:
    """Tell whether a full-size trial cannot go on, even with time left: it raised, or it diverged.

    A metric may be finite again later. But a training function of the user's is left where its metric is not.
    """
    own_loop = run.problem.full_size is not None and run.epochs("target", number) > 0
    lost = own_loop and not math.isfinite(run.score("target", number))
    return lost or number in run.failures or run.diverged("target", number)


def _advance(run: Run, number: int, unit: Unit) -> list[str]:
    """Take in a trial's new checkpoint, which also ends an earlier failure; return the checkpoint that it replaced."""
    run.failures.pop(number, None)
    before, name = run.checkpoints.get(number), unit.value["checkpoint"]
    run.checkpoints[number] = name
    if (best := unit.value.get("best")) is not None:
        run.best[number] = best["epoch"], best["score"]
    if unit.value.get("swept"):
        epoch = int(name.rpartition("-")[2])
        swept = run.metrics["surrogate", number]
        run.metrics["target", number] = [line for line in swept if line["epoch"] <= epoch]
    return [] if before in (None, name) else [before]
