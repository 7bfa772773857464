"""Record the race of a run in its journal.

All backends record full-size trainings in the same way, so that each backend can resume the work of another:

- `race/trial-{n}/at-{epoch}`: a trial's metrics after each epoch, as soon as the tuner hears of them. No decision of
  the run depends on this unit. Its name ends with `/again` if the trial had reached this epoch before an interruption.
  Then it has only the lines that differ.
- `race/trial-{n}/to-{epoch}`: `{"checkpoint": name}`, from which training can continue after this epoch. The lines are
  the metrics since the trial's last checkpoint that the journal does not have yet. The value may have more keys:
  - "best": the epoch whose weights the checkpoint keeps, and its score.
  - "swept": true if the sweep trained these epochs. Then the sweep's metrics up to there are also the trial's.
  - "device": the device, if there are several.
  - "beside": the number of trials that shared the device, this trial included.
  - "early": true if the trial had not entered the race. Then its training counts once it enters.
- `race/trial-{n}/failed-after-{epoch}`: the traceback of a trial that raised.
- `race/trial-{n}/done-after-{epoch}`: the trial's training has ended by itself, before the last epoch.
- `race/trial-{n}/lost-after-{epoch}`: the trial's checkpoint is damaged, so that it trains anew.
- `race/retry-of-{n}`: a trial that failed is tried again, because code or data has changed since.
- `race/entered` (then `race/entered/again`, ...): the finalists; the race between them begins, and is decided anew.
- `race/begin/of-{trials}`: the first milestone of each finalist.
- `race/to-{epoch}/kept/of-{trials}`: for each trial that was compared after this epoch, the epoch to which it trains
  on, or None.
- `race/refit-{n}/to-{epoch}`: a trial's model of that epoch, trained once more on the examples of all folds.
- `race/done`: the race is over, for the finalists that it names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydro_rasda.history.full_size import BY_SCORE, refit_key, tried_targets
from hydro_rasda.history.history import CALL, DONE, FULL_TRAINING, KINDS_FROM, RACE_DECISION, Live
from hydro_rasda.history.lines import (
    WIDTHS_OF,
    EpochTold,
    JournalLine,
    Unit,
    failure_line,
    jsonable,
    metric_lines,
    retry_key,
)
from hydro_rasda.history.scores import kept_of
from hydro_rasda.history.winner import best_of
from hydro_rasda.run.crash_log import DROPPED
from hydro_rasda.run.events import TrialEnded
from hydro_rasda.run.run_folder import CHANGED
from hydro_rasda.run.state import Run


def hear(run: Run, epochs: int, metrics: Mapping[str, Iterable[float]], told: Sequence[EpochTold] = ()) -> None:
    """Handle a report that a device sends while it trains: announce its epochs, and record those of full-size models.

    Args:
        epochs: Number of epochs trained since the device's last report, over all trials.
        metrics: Metrics after the last of these epochs, by name: one value for each trial that trains as one.
        told: The epochs of full-size models in the report.
    """
    # Do not announce epochs of trials that have not entered the race yet, because no heat counts them.
    if not told or any(number in run.history.race.trials for number, *_ in told):
        run.advance(epochs, run.note(metrics))
    for number in dict.fromkeys(number for number, *_ in told):
        _record_live(run, number, [(epoch, found) for of, epoch, found in told if of == number])


def _record_live(run: Run, number: int, trained: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Record epochs of a full-size trial while its training continues."""
    reached = run.history.epochs("race", number)
    trained = [(epoch, metrics) for epoch, metrics in trained if epoch > reached]
    # Ignore a late report. In a cluster, it may arrive after the trial has trained further or has failed.
    if not trained or ("race", number) in run.history.failed:
        return
    key = f"race/trial-{number}/at-{trained[-1][0]}"
    while run.store.done(key):
        key += "/again"
    lines = _new_lines(run, number, metric_lines("race", number, trained))
    # Suppress an OSError: raised here, within training, it could be taken for an error of the trial. Recording the next
    # unit raises it again.
    with contextlib.suppress(OSError):
        run.record(key, Unit(None, lines))


def _new_lines(run: Run, number: int, lines: Iterable[JournalLine]) -> list[JournalLine]:
    """Return the lines of a full-size trial that the journal does not have yet as live epochs."""
    known = run.history.live.get(number, Live()).lines
    return [line for line in lines if line["epoch"] not in known or jsonable(line) != known[line["epoch"]]]


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
    """Record epochs of a full-size trial: first write the checkpoint, then the journal's lines.

    Args:
        lines: The trial's metrics since its last record. They begin earlier if the trial trained epochs again.
        state: The content of the checkpoint.
        epoch: The epoch that was reached; None for that of the last line.
        more: Further entries of the unit's value.
    """
    key = f"race/trial-{number}/to-{lines[-1]['epoch'] if epoch is None else epoch}"
    run.save(key, state, [number])
    if "best" in state:
        more["best"] = {name: state["best"][name] for name in ("epoch", "score")}
    run.record(key, Unit({"checkpoint": key, **more}, _new_lines(run, number, lines), seconds), again=True)


def record_swept(run: Run, number: int, state: Mapping[str, Any]) -> None:
    """Record the epochs that a full-width sweep has trained as the beginning of a trial's full-size training."""
    record_epochs(run, number, [], state, epoch=run.history.epochs("sweep", number), swept=True)


def record_refit(run: Run, number: int, epoch: int, state: Mapping[str, Any], seconds: float) -> None:
    """Record a model that was trained once more; the checkpoint of an earlier such model is removed."""
    key = refit_key(number, epoch)
    run.save(key, state, [number])
    run.record(key, Unit({"epochs": epoch}, [], seconds), again=True)


def record_failure(run: Run, number: int, error: str, seconds: float = 0.0) -> None:
    """Record that a full-size trial raised, with its traceback."""
    key = f"race/trial-{number}/failed-after-{run.history.epochs('race', number)}"
    run.record(key, Unit(None, [failure_line(number, error)], seconds), again=True)


def record_done(run: Run, number: int) -> None:
    """Record that the training of a full-size trial has ended by itself before the last epoch."""
    epoch = run.history.epochs("race", number)
    key = f"race/trial-{number}/done-after-{epoch}"
    if epoch < run.settings.max_t and not run.store.done(key):
        run.record(key, Unit(None))
        run.notify(TrialEnded, trial=number, epoch=epoch)


def source_of(run: Run, number: int) -> str | None:
    """Return the checkpoint from which a full-size trial continues; None if it starts anew. Report a damaged one."""
    name = run.history.checkpoints.get(number)
    if name is None or not (damage := run.store.damage(name)):
        return name
    run.say(f"{damage}: trial {number} trains again")
    run.record(f"race/trial-{number}/lost-after-{run.history.epochs('race', number)}", Unit(None), again=True)
    return None


def lost_winner(run: Run, finalists: Sequence[int]) -> int | None:
    """Return the winner of a finished run if its weights are damaged, so that it must train anew; otherwise None."""
    history = run.history
    winner, _ = best_of(history, tried_targets(history, finalists))
    refit = refit_key(winner, kept_of(history, winner)[0])
    if history.settings.race.refit and history.refits.get(winner) == refit and run.can_load(refit):
        return None
    name = history.checkpoints.get(winner) if winner in finalists else None
    return winner if name is not None and run.store.damage(name) else None


def end_by_score(run: Run) -> None:
    """Record and report that a score is good enough. The same call with another `stop_at` continues the run."""
    settings = run.settings
    run.end_by(f"{BY_SCORE}{settings.stop_at}")
    run.say(f"{settings.metric} is as good as `stop_at={settings.stop_at}` asks: nothing more trains")


def failed_before_change(run: Run, finalists: Iterable[int]) -> list[int]:
    """Return the failed finalists that may try again, because code or data have changed since they failed."""
    keys = [*run.store.units()]
    if CHANGED not in keys:
        return []
    names = map(FULL_TRAINING.fullmatch, keys[keys.index(CHANGED) :])
    since = {int(name["trial"]) for name in names if name is not None and name["what"] == "failed-after"}
    return [n for n in finalists if ("race", n) in run.history.failed and n not in since]


def try_again(run: Run, number: int) -> None:
    """Let a failed finalist, which has entered the race once more, train again."""
    run.record(f"race/retry-of-{number}", Unit(None, [{"event": "retried", "trial": number}]), again=True)


def try_dropped_again(run: Run) -> None:
    """Take back units that record work as dropped because the tuner's own process died of it.

    Then the sweep decides anew. Call this before the run's history reads any unit.
    """
    units = run.store.units()

    def dropped(line: JournalLine) -> bool:
        return str(line.get("error", "")).startswith(DROPPED)

    found = {key: of for key, unit in units.items() if (of := [line["trial"] for line in unit.lines if dropped(line)])}
    # Keep the units of `KINDS_FROM`, because they hold the configurations of all their trials.
    built = [n for key, of in found.items() if key.startswith(KINDS_FROM) for n in of if retry_key(n) not in units]
    keys = [key for key in found if not key.startswith(KINDS_FROM)]
    if numbers := sorted({*built, *(n for key in keys for n in found[key])}):
        run.say(f"trials {', '.join(map(str, numbers))} are tried again, as `resume` is 'changed'")
        run.store.record(CALL, Unit({"samples": run.settings.num_samples}), again=True)
        # The race is decided anew, too. Its entries stay, so that trainings that began before an entry still count.
        run.store.forget([key for key in units if RACE_DECISION.fullmatch(key) or key == DONE])
    for number in built:
        run.store.record(retry_key(number), Unit(None, [{"event": "retried", "trial": number}]))
    # Also measure again the group sizes that were only assumed, perhaps because measuring them killed processes.
    assumed = [key for key, unit in units.items() if WIDTHS_OF in key and unit.value.get("assumed")]
    # Take these back last: if the process is killed before, the next call still finds what was dropped.
    run.store.forget([*assumed, *keys])
