"""Summing up what a run has found so far, without torch, Ray or the disk."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from hydro_rasda.config import TuneConfig
from hydro_rasda.results.records import Cost, RunRecord, Status, TrialRecord
from hydro_rasda.results.winner import best_of, eligible, scored
from hydro_rasda.run.full_size_journal import averages_lost, done_early, expected_ends, kept_of, refit_key, run_end
from hydro_rasda.run.state import Run, Stage
from hydro_rasda.schedulers import Agreement, ExpectedEnd, agreement, chances, expected_gain

AVERAGED = {
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd"),
    *("lion", "muon", "nadam", "prodigy", "radam", "rmsprop", "sgd"),
}
"""Optimizers that do not average weights by themselves; a test holds them to those of `fusion`, which needs torch."""


def sum_up(run: Run, finalists: list[int], undecided: Collection[int] | None = None) -> RunRecord:
    """Sum up what a run has found so far, whether it is over or not.

    `finalists` are all trials that were trained at full size; `undecided` may train on, None if the run is over.
    """
    over, max_t = undecided is None, run.settings.max_t
    able = eligible(run, finalists)
    end = max((run.epochs("target", n) for n in able), default=0) if over else max_t
    at_end = [n for n in (able if over else finalists) if run.epochs("target", n) >= end or done_early(run, n)]
    best, metric = best_of(run, finalists)
    found = _within_bounds(run, expected_ends(run, finalists), best)
    chance = chances(found, run.settings.mode)
    records = {n: _record(run, n, at_end, undecided or (), chance.get(n, math.nan)) for n in sorted(run.trials)}
    return RunRecord(
        best_config=copy.deepcopy(dict(run.trials[best].config)) if best in run.trials else {},
        best_metric=metric,
        trials=tuple(records.values()),
        metric=run.settings.metric,
        mode=run.settings.mode,
        expected_gain=expected_gain([*found.values()], run.settings.mode),
        cost=_cost(run),
        transfer=run.transfer,
        agreement=_agreement(run, finalists),
        path=run.store.path,
        best_trial=best,
        finished=run_end(run) == "finished",
        ended=over,
        keep=run.settings.race.keep,
        averaged=_averaged(run, records[best]) if best in records else None,
        seconds_left=None if over else next((unit.left for unit in [*run.store.units().values()][-1:]), None),
        over=models_in_words(run.settings, "target"),
        _hidden=frozenset(run.hidden),
        _unkept={number: places for number, places in run.unkept.items() if places},
        _comparison=run.settings.comparison,
        _needed=[*map(run.store.file, sorted((*run.checkpoints.values(), *run.refits.values())))],
        _checkpoints={n: run.store.file(name) for n, name in (run.checkpoints | _refit(run)).items()},
    )


def _within_bounds(run: Run, ends: Mapping[int, ExpectedEnd], winner: int) -> dict[int, ExpectedEnd]:
    """Give no end to trials that break bounds of metrics more than the winner does: they cannot win."""
    values = {n: run.values_at("target", n, kept_of(run, n)[0]) for n in {*ends, winner}}
    broken = run.settings.comparison.violations(values)
    return {n: end if broken[n] <= broken[winner] else replace(end, end=math.nan) for n, end in ends.items()}


def models_in_words(settings: TuneConfig, stage: Stage) -> str:
    """Say how many models a trial trains in a stage, such as "5 folds" or "3 seeds"; empty if it is one."""
    models, folds = settings.models(stage), settings.folds
    if models == 1:
        return ""
    seeds = models // max(1, folds)
    return " and ".join([f"{folds} folds"] * (folds > 0) + [f"{seeds} seeds"] * (seeds > 1))


def _refit(run: Run) -> dict[int, str]:
    """Return the checkpoint of the model that was trained once more, if that is what the run hands back."""
    wanted = run.settings.race.refit
    return {n: name for n, name in run.refits.items() if wanted and name == refit_key(n, kept_of(run, n)[0])}


def _agreement(run: Run, finalists: Sequence[int]) -> Agreement | None:
    swept = [n for n in finalists if run.epochs("surrogate", n)]  # others train by a schedule that the sweep found
    began = [n for n in swept if run.epochs("target", n) and n not in run.failures]
    epoch = min((run.epochs("target", n) for n in scored(run, began)), default=0)
    if run.settings.sweep.surrogate == 1 or not epoch:
        return None
    narrow = min(epoch, *(run.epochs("surrogate", n) for n in began))
    scores = {n: (run.score_at("surrogate", n, narrow), run.score_at("target", n, epoch)) for n in sorted(began)}
    return agreement(epoch, scores, run.settings.mode)


def swept_epochs(trial: TrialRecord, surrogate: float) -> int:
    """Count the first epochs of a full-size training that the sweep trained, at full width and without averages."""
    if surrogate != 1:
        return 0
    return min((line["epoch"] - 1 for line in trial.history if line["stage"] == "target"), default=trial.epochs)


def averages(settings: TuneConfig, config: Mapping[str, Any]) -> bool | None:
    """Tell whether full-size training averages weights over steps (`ema`).

    None if the optimizer averages them by itself, or is a function of which a loaded run knows the name alone.
    """
    names = [config.get("optimizer", "adamw"), *(config[key] for key in config if key.startswith("optimizer."))]
    if all(isinstance(name, str) for name in names):
        known = AVERAGED.issuperset(names)
    else:
        # These need torch, which a run that is only read does without.
        from fusion.optim import Hyperparameters
        from fusion.part_settings import configs_of_parts

        known = not any(Hyperparameters.from_config(own).has_modes for own in configs_of_parts(config).values())
    return None if not known else settings.race.keep == "best" and settings.race.ema > 0


def _averaged(run: Run, trial: TrialRecord) -> bool | None:
    """Tell whether the weights that count are averages over steps; None if no loop of the library trained them."""
    if not trial.epochs or run.problem.full_size is not None:
        return None
    return averages(run.settings, trial.config) and averages_count(run.settings, trial)


def averages_count(settings: TuneConfig, trial: TrialRecord) -> bool:
    """Tell whether averaged weights, where full-size training averages any, are those of the trial's kept epoch."""
    after = trial.kept_epoch > swept_epochs(trial, settings.sweep.surrogate)
    return after and not averages_lost(trial.history, trial.kept_epoch, settings.metric)


def _record(run: Run, number: int, at_end: Collection[int], undecided: Collection[int], chance: float) -> TrialRecord:
    kept_epoch, metric = kept_of(run, number)
    return TrialRecord(
        trial=number,
        config=run.trials[number].config,
        status=_status(run, number, at_end, undecided),
        surrogate_metric=run.score("surrogate", number),
        surrogate_epochs=run.epochs("surrogate", number),
        metric=metric,
        epochs=run.epochs("target", number),
        chance=chance,
        kept_epoch=kept_epoch,
        history=tuple(
            {name: value for name, value in line.items() if name not in ("event", "trial")}
            for stage in ("surrogate", "target")
            for line in run.metrics.get((stage, number), ())
            if line["stage"] == stage
        ),
        error=run.failures.get(number),
        costs=dict(run.costs.get(number, {})),
        unread=tuple(sorted(run.unread.get(number, ()))),
        spread=_spread(run, number, kept_epoch),
    )


def _spread(run: Run, number: int, kept_epoch: int) -> float | None:
    """Return the standard deviation of a trial's score over its models; None if it trained one."""
    full = run.epochs("target", number) > 0
    stage: Stage = "target" if full else "surrogate"
    at = kept_epoch if full else run.epochs("surrogate", number)
    lines = [line for line in run.metrics.get((stage, number), ()) if line["epoch"] == at]
    return next((line[run.settings.spread] for line in lines if run.settings.spread in line), None)


def _status(run: Run, number: int, at_end: Collection[int], undecided: Collection[int]) -> Status:
    if number in run.failures:
        return "failed"
    if not run.epochs("surrogate", number) and not run.epochs("target", number):
        return "not begun"
    stage: Stage = "target" if run.epochs("target", number) else "surrogate"
    if not math.isfinite(run.score(stage, number)):
        return "diverged"
    if number in at_end:
        return "finished"
    return "undecided" if number in undecided else "stopped"


def _cost(run: Run) -> Cost:
    units = run.store.units().items()

    def seconds(stage: str) -> float:
        return sum(unit.seconds for key, unit in units if key.startswith(f"{stage}/"))

    def epochs(stage: Stage) -> int:
        of_trials: int = sum(line["stage"] == of == stage for (of, _), lines in run.metrics.items() for line in lines)
        return of_trials * run.settings.models(stage)

    refit = sum(unit.value["epochs"] for key, unit in units if "/refit-" in key)
    trained = [
        (unit.seconds, sum(line["event"] == "metrics" for line in unit.lines) * run.settings.models("target"))
        for key, unit in units
        if key.startswith("target/")
    ]
    each = [spent / count for spent, count in trained for _ in range(count)]
    return Cost(
        surrogate_epochs=epochs("surrogate"),
        surrogate_seconds=seconds("surrogate"),
        target_epochs=epochs("target") + refit,
        target_seconds=seconds("target"),
        target_epoch_seconds=median(each) if each else math.nan,
        seconds=max((unit.at for _, unit in units), default=0.0),
    )
