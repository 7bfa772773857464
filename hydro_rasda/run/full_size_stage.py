"""The full-size stage, as the journal keeps it.

What is trained at full size is recorded alike on every backend, so that each goes on with what another began:

- `target/trial-{n}/to-{epoch}`: a trial's metrics since its unit before, and `{"checkpoint": name}` of what training
  can go on from after this epoch; beside it, which epoch's weights it keeps as "best",
  and whether it was "swept": trained by the sweep, whose metrics up to there are then the trial's own. Of several
  devices, the "device"; where trials shared it, how many trained "beside" each other, itself included.
- `target/trial-{n}/failed-after-{epoch}`: its traceback.
- `target/trial-{n}/done-after-{epoch}`: its training has ended by itself, before the last epoch.
- `target/done`: the stage is over, for the finalists that it names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from hydro_rasda.config import Mode
from hydro_rasda.run.events import TrialEnded
from hydro_rasda.run.journal import JournalLine, Unit
from hydro_rasda.run.state import FINALISTS, Run, decision_key, failure_line
from hydro_rasda.schedulers import ExpectedEnd, Race, rank

DONE = "target/done"
_ENDED = "target/ended-by-"
_BY_SCORE = f"{_ENDED}score-"

RunEnd = Literal["finished", "out of time", "open"]

_UNIT = re.compile(r"target/trial-(?P<trial>\d+)/(?P<what>to|failed-after|done-after)-(?P<epoch>\d+)")
_KEPT = re.compile(r"target/to-(\d+)/kept.*")


def race_of(run: Run) -> Race:
    """The rule that the settings of a run ask for."""
    asked = run.settings
    return Race(asked.max_t, asked.mode, asked.race.reduction_factor, asked.full_trainings)


def deciding_curve(run: Run, number: int) -> dict[int, float]:
    """What a full-size trial is compared by, by epoch.

    With `keep="best"`, a trial hands back its best epoch, but trials are compared by their last epochs: who trains the
    winner's configuration again, elsewhere or on more data, gets that. Where weights are averaged, the curve has the
    epochs at which those that training left were validated as well. Where early stopping (`patience`, or a function of
    the user's own that returns before the end) says when to end, the best epoch so far counts.
    """
    settings, curve = run.settings, run.curve("target", number)
    if settings.race.keep == "best" and (settings.race.patience is not None or done_early(run, number)):
        return dict(zip(curve, accumulate(curve.values(), partial(_better, mode=settings.mode))))
    lines, name = run.metrics.get(("target", number), ()), settings.unaveraged
    return {line["epoch"]: run.score_of(line, name) for line in lines if name in line} or curve


def _better(one: float, other: float, mode: Mode) -> float:
    return (one, other)[rank((one, other), mode)[0]]


def expected_ends(run: Run, numbers: Iterable[int]) -> dict[int, ExpectedEnd]:
    """How trials that began at full size will probably end, those that failed included."""
    began = [n for n in numbers if run.epochs("target", n)]
    full = {n: {} if n in run.failures else deciding_curve(run, n) for n in began}
    found = race_of(run).expected_ends(full, [n for n in began if done_early(run, n)])
    none_ended = not any(at_the_end(run, n) for n in began)
    for n in began if run.settings.race.keep == "best" and none_ended else ():
        if ended_early(run, n) and n in run.best:
            _, best = run.best[n]
            found[n] = ExpectedEnd(best, 0.0)
    return found


def at_the_end(run: Run, number: int) -> bool:
    """Whether a full-size training came to its end with a finite score: its last epoch, or where it ended by itself."""
    if number in run.failures or not math.isfinite(run.score("target", number)):
        return False
    return run.epochs("target", number) >= run.settings.max_t or done_early(run, number)


def recall_targets(run: Run) -> None:
    """Take in what was recorded of the full-size stage, by whichever backend; once or again.

    Checkpoints that later ones took the place of are removed, in case the process that wrote these was killed before.
    """
    run.store.discard(take_in_targets(run))


def take_in_targets(run: Run) -> list[str]:
    """The same, with nothing removed; returns the checkpoints that later ones took the place of."""
    run.checkpoints.clear()  # else the last of them would seem to come before the first
    replaced: dict[str, None] = {}
    for key in run.store.units():
        if (name := _UNIT.fullmatch(key)) is not None:
            unit = run.recall(key)
            if name["what"] == "to":
                replaced |= dict.fromkeys(_advance(run, int(name["trial"]), unit))
    return [name for name in replaced if name not in run.checkpoints.values()]


def decided_targets(run: Run) -> dict[int, bool]:
    """Of full-size trials that stand where a decision was taken, whether they go on."""
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
            there = (number for number, epoch in reached.items() if epoch == int(decision[1]))
            decided |= {number: number in unit.value for number in there}
    return decided


def tried_targets(run: Run, finalists: Sequence[int]) -> list[int]:
    """The finalists, and all others that were trained at full size."""
    return [*finalists, *sorted({n for stage, n in run.metrics if stage == "target"} - set(finalists))]


def source_of(run: Run, number: int) -> str | None:
    """The checkpoint that a full-size trial goes on from; None where it begins anew, as after damage, which is said."""
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
    **more: Any,
) -> None:
    """Keep epochs of a full-size trial: first the checkpoint, then the journal's lines.

    Args:
        run: It is taken in there, too.
        lines: Its metrics since the last that was recorded, or from an earlier epoch on where it went back; the last
            line's epoch is the one that was reached.
        state: To go on from there.
        seconds: Wall time that they took.
        more: What else the unit's value says: plain values.
    """
    _keep(run, number, lines[-1]["epoch"], lines, state, seconds, more)


def record_swept(run: Run, number: int, state: Mapping[str, Any]) -> None:
    """Keep what the sweep trained of a trial, at full width, as the beginning of its full-size training."""
    _keep(run, number, run.epochs("surrogate", number), [], state, 0.0, {"swept": True})


def recorded_epochs(run: Run, number: int) -> int:
    """Epochs that full-size training of a trial has come to by what is recorded, taken in or not."""
    names = [name for key in run.store.units() if (name := _UNIT.fullmatch(key)) and int(name["trial"]) == number]
    return max((int(name["epoch"]) for name in names), default=0)


def _keep(
    run: Run,
    number: int,
    epoch: int,
    lines: Sequence[JournalLine],
    state: Mapping[str, Any],
    seconds: float,
    more: dict[str, Any],
) -> None:
    key = f"target/trial-{number}/to-{epoch}"
    run.save(key, state, [number])
    if "best" in state:
        more["best"] = {name: state["best"][name] for name in ("epoch", "score")}
    value = {"checkpoint": key, **more}
    run.store.discard(_advance(run, number, run.record(key, Unit(value, list(lines), seconds), again=True)))


def record_failure(run: Run, number: int, error: str, seconds: float = 0.0) -> None:
    """Keep that a full-size trial raised: its traceback."""
    line = failure_line(number, error)
    key = f"target/trial-{number}/failed-after-{run.epochs('target', number)}"
    run.record(key, Unit(None, [line], seconds), again=True)


def record_done(run: Run, number: int) -> None:
    """Keep that the training of a full-size trial has ended by itself: it does not go on."""
    epoch = run.epochs("target", number)
    key = f"target/trial-{number}/done-after-{epoch}"
    if epoch < run.settings.max_t and not run.store.done(key):
        run.store.record(key, Unit(None))
        run.notify(TrialEnded, trial=number, epoch=epoch)


def done_early(run: Run, number: int) -> bool:
    """Whether the training of a full-size trial has ended by itself where it is, before the last epoch."""
    return run.store.done(f"target/trial-{number}/done-after-{run.epochs('target', number)}")


def run_end(run: Run) -> RunEnd:
    """Whether nothing trains any more: the one place that decides it, for results, the command line and pages.

    A run has finished where its sweep has chosen the finalists of all its trials, and the last that it says of the
    full-size stage is that it is over for them, or that a score is good enough. Samples that were added to a run may
    leave both as they were. It is out of time where all that it says last is an end, without that.
    """
    units, last = run.store.units(), _last_target(run)
    sweep = units.get(decision_key(FINALISTS, run.trials))
    if sweep is not None and (targets_over(run, sweep.value) or last.startswith(_BY_SCORE)):
        return "finished"
    return "out of time" if next(reversed([*units]), "") == last and last.startswith((DONE, _ENDED)) else "open"


def found_enough(run: Run) -> bool:
    """Whether a full-size model is as good as `stop_at` asks."""
    return any(run.settings.good_enough(score) for _, score in run.best.values())


def end_by_score(run: Run) -> None:
    """Put down, and say, that a score is good enough: the same call with another `stop_at` goes on."""
    run.end_by(f"{_BY_SCORE}{run.settings.stop_at}")
    run.say(f"{run.settings.metric} is as good as `stop_at={run.settings.stop_at}` asks: nothing more trains")


def targets_over(run: Run, finalists: Iterable[int]) -> bool:
    """Whether the stage has come to its end with these finalists, and nothing of it has gone on since."""
    return _last_target(run) == DONE and run.store.units()[DONE].value == sorted(finalists)


def _last_target(run: Run) -> str:
    """The last that the journal has of the full-size stage."""
    return next((key for key in reversed([*run.store.units()]) if key.startswith("target/")), "")


def end_targets(run: Run, finalists: Iterable[int]) -> None:
    """Keep that the stage has come to its end with these finalists."""
    run.end_by(DONE, sorted(finalists))


def another_chance(run: Run, finalists: Iterable[int]) -> bool:
    """Whether any failed under code or data that are others now: those are tried again."""
    again = [n for n in finalists if n in run.failures and run.store.changes]
    for number in again:
        del run.failures[number]
    return bool(again)


def ended_early(run: Run, number: int) -> bool:
    """Whether a full-size trial cannot go on, time or no time: it raised, or it diverged."""
    began = run.epochs("target", number) > 0
    return number in run.failures or (began and not math.isfinite(run.score("target", number)))


def _advance(run: Run, number: int, unit: Unit) -> list[str]:
    """A trial has trained since it failed, if it did, and has left a checkpoint; returns the one before that."""
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
