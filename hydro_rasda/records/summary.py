"""Sum up what a run has found so far, without torch, Ray or the disk."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from fusion.keys import configs_of_parts
from hydro_rasda.common.heat_names import HEAT_NAMES, HeatName
from hydro_rasda.common.secret_masking import Place
from hydro_rasda.history.full_size import expected_ends, refit_key, run_end
from hydro_rasda.history.history import History
from hydro_rasda.history.lines import JournalLine
from hydro_rasda.history.scores import averages_lost, done_early, kept_of
from hydro_rasda.history.transfer import transfer_of
from hydro_rasda.history.winner import best_of, eligible, scored
from hydro_rasda.records.records import Cost, RunRecord, Status, TrialRecord
from hydro_rasda.run.run_folder import checkpoint_file
from hydro_rasda.schedulers import Agreement, ExpectedEnd, agreement, chances, expected_gain
from hydro_rasda.settings.config import TuneConfig

AVERAGED = {
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd"),
    *("lion", "muon", "nadam", "prodigy", "radam", "rmsprop", "sgd"),
}
"""Optimizers that do not average weights by themselves. They are repeated here because `fusion`, which knows them,
needs torch. A test compares both.
"""


class AllTrialsFailed(RuntimeError):
    """No trial of a heat ended with a finite metric."""


def sum_up(
    history: History,
    finalists: list[int],
    path: Path,
    undecided: Collection[int] | None = None,
    hidden: Collection[Place] = (),
) -> RunRecord:
    """Sum up what a run has found so far, whether it is over or not.

    Args:
        finalists: All trials that were trained at full size.
        path: The run's folder.
        undecided: Trials that may train further; None if the run is over.
        hidden: Places of secrets in configurations.
    """
    over, max_t = undecided is None, history.settings.max_t
    able = eligible(history, finalists)
    end = max((history.epochs("race", n) for n in able), default=0) if over else max_t
    at_end = [n for n in (able if over else finalists) if history.epochs("race", n) >= end or done_early(history, n)]
    best, metric = best_of(history, finalists)
    found = _within_bounds(history, expected_ends(history, finalists), best)
    chance = chances(found, history.settings.mode)
    records = {n: _record(history, n, at_end, undecided or (), chance.get(n, math.nan)) for n in sorted(history.trials)}
    return RunRecord(
        best_config=copy.deepcopy(dict(history.trials[best].config)) if best in history.trials else {},
        best_metric=metric,
        trials=tuple(records.values()),
        metric=history.settings.metric,
        mode=history.settings.mode,
        expected_gain=expected_gain([*found.values()], history.settings.mode),
        cost=_cost(history, history.seconds if over else max(history.seconds, history.now)),
        transfer=transfer_of(history),
        agreement=_agreement(history, finalists),
        path=path,
        best_trial=best,
        finished=run_end(history) == "finished",
        ended=over,
        keep=history.settings.race.keep,
        averaged=_averaged(history, records[best]) if best in records else None,
        seconds_left=None if over else history.left,
        max_t=max_t,
        over=models_in_words(history.settings, "race"),
        _hidden=frozenset(hidden),
        _unkept={number: places for number, places in history.unkept.items() if places},
        _comparison=history.settings.comparison,
        _needed=[checkpoint_file(path, name) for name in sorted(_resumed_from(history))],
        _checkpoints={n: checkpoint_file(path, name) for n, name in (history.checkpoints | _refit(history)).items()},
    )


def _resumed_from(history: History) -> set[str]:
    """Return the names of the checkpoints that the run's result or its resumption needs."""
    early = [key for key, _ in history.early.values()]  # such a trial may still enter the race
    # If `stop_at` ended the heats on surrogates, a later call that asks for more resumes them.
    sources = [heat.sources.values() for heat in history.heats.values() if history.at_full_size is None]
    return {*history.checkpoints.values(), *history.refits.values(), *early, *chain.from_iterable(sources)}


def _within_bounds(history: History, ends: Mapping[int, ExpectedEnd], winner: int) -> dict[int, ExpectedEnd]:
    """Set the expected final score to NaN for trials that break bounds more than the winner, as they cannot win."""
    values = {n: history.values_at("race", n, kept_of(history, n)[0]) for n in {*ends, winner}}
    broken = history.settings.comparison.violations(values)
    return {n: end if broken[n] <= broken[winner] else replace(end, end=math.nan) for n, end in ends.items()}


def models_in_words(settings: TuneConfig, heat: HeatName) -> str:
    """Say how many models a trial trains in a heat, such as "5 folds" or "3 seeds"; empty for one model."""
    models, folds = settings.models(heat), settings.folds
    if models == 1:
        return ""
    seeds = models // max(1, folds)
    return " and ".join([f"{folds} folds"] * (folds > 0) + [f"{seeds} seeds"] * (seeds > 1))


def _refit(history: History) -> dict[int, str]:
    """Map a refitted trial (`RaceConfig.refit`) to its checkpoint; empty if the run returns no refitted model."""
    wanted = history.settings.race.refit
    return {n: name for n, name in history.refits.items() if wanted and name == refit_key(n, kept_of(history, n)[0])}


def _agreement(history: History, finalists: Sequence[int]) -> Agreement | None:
    # Leave out new trials without a surrogate, which population based training adds to train by its schedules.
    swept = [n for n in finalists if history.epochs("sweep", n)]
    began = [n for n in swept if history.epochs("race", n) and n not in history.failures]
    epoch = min((history.epochs("race", n) for n in scored(history, began)), default=0)
    if history.settings.sweep.surrogate == 1 or not epoch:
        return None
    narrow = min(epoch, *(history.epochs("sweep", n) for n in began))
    scores = {n: (history.score_at("sweep", n, narrow), history.score_at("race", n, epoch)) for n in sorted(began)}
    return agreement(epoch, scores, history.settings.mode)


def swept_epochs(trial: TrialRecord, surrogate: float) -> int:
    """Count the epochs of a full-size training that the sweep already trained; 0 if the sweep used a surrogate.

    Weights are not averaged in these epochs, because the sweep averages none.
    """
    if surrogate != 1:
        return 0
    return min((line["epoch"] - 1 for line in trial.history if line["heat"] == "race"), default=trial.epochs)


def averages(settings: TuneConfig, config: Mapping[str, Any]) -> bool | None:
    """Tell whether full-size training averages weights over steps (`ema`).

    Return None if the optimizer averages weights by itself, or if it is a function of which a loaded run knows only the
    name.
    """
    names = [config.get("optimizer", "adamw"), *(config[key] for key in config if key.startswith("optimizer."))]
    if all(isinstance(name, str) for name in names):
        known = AVERAGED.issuperset(names)
    else:
        from fusion.optim import Hyperparameters  # imported here, because reading a run must not import torch

        known = not any(Hyperparameters.from_config(own).has_modes for own in configs_of_parts(config).values())
    return None if not known else settings.race.keep == "best" and settings.race.ema > 0


def _averaged(history: History, trial: TrialRecord) -> bool | None:
    """Tell whether the kept weights are averages over steps; None if the user's `train` function made them."""
    if not trial.epochs or history.own_loop:
        return None
    return averages(history.settings, trial.config) and keeps_averages(history.settings, trial)


def keeps_averages(settings: TuneConfig, trial: TrialRecord) -> bool:
    """Tell whether the kept epoch's weights are averages, given that full-size training averages weights."""
    after = trial.kept_epoch > swept_epochs(trial, settings.sweep.surrogate)
    return after and not averages_lost(trial.history, trial.kept_epoch, settings.metric)


def _told(line: JournalLine) -> dict[str, Any]:
    """Return the heat, epoch and metrics of a journal line, as `TrialRecord.history` has them."""
    return {name: value for name, value in line.items() if name not in ("event", "trial")}


def _record(
    history: History, number: int, at_end: Collection[int], undecided: Collection[int], chance: float
) -> TrialRecord:
    kept_epoch, metric = kept_of(history, number)
    failed = history.has_failed("race", number)
    goes_on = number in undecided and not failed
    return TrialRecord(
        trial=number,
        config=history.trials[number].config,
        status=_status(history, number, at_end, undecided),
        sweep_metric=history.score("sweep", number),
        sweep_epochs=history.epochs("sweep", number),
        middle_metric=history.score("middle", number),
        middle_epochs=history.epochs("middle", number),
        metric=metric,
        epochs=history.epochs("race", number),
        chance=chance,
        kept_epoch=kept_epoch,
        history=tuple(
            _told(line)
            for heat in HEAT_NAMES
            for line in history.metrics.get((heat, number), ())
            if line["heat"] == heat
        ),
        live=tuple(map(_told, history.live[number].trained())) if number in history.live and goes_on else (),
        error=history.failures[number] if failed else None,
        costs=dict(history.costs.get(number, {})),
        unread=tuple(sorted(history.unread.get(number, ()))),
        spread=_spread(history, number, kept_epoch),
    )


def _spread(history: History, number: int, kept_epoch: int) -> float | None:
    """Return the standard deviation of a trial's score over its models; None if it trained one model."""
    full = history.epochs("race", number) > 0
    heat: HeatName = "race" if full else "sweep"
    at = kept_epoch if full else history.epochs("sweep", number)
    lines = [line for line in history.metrics.get((heat, number), ()) if line["epoch"] == at]
    return next((line[history.settings.spread] for line in lines if history.settings.spread in line), None)


def _status(history: History, number: int, at_end: Collection[int], undecided: Collection[int]) -> Status:
    if history.has_failed("race", number):
        return "failed"
    if not history.epochs("sweep", number) and not history.epochs("race", number):
        return "not begun"
    heat: HeatName = "race" if history.epochs("race", number) else "sweep"
    if not math.isfinite(history.score(heat, number)):
        return "diverged"
    if number in at_end:
        return "finished"
    return "undecided" if number in undecided else "stopped"


def _cost(history: History, seconds: float) -> Cost:
    def epochs(heat: HeatName) -> int:
        lines = (line for (of, _), of_trial in history.metrics.items() if of == heat for line in of_trial)
        of_trials: int = sum(line["heat"] == heat for line in lines)
        return of_trials * history.settings.models(heat)

    each = [seconds for seconds, count in history.epoch_seconds for _ in range(count)]
    return Cost(
        sweep_epochs=epochs("sweep"),
        sweep_seconds=history.spent["sweep"],
        middle_epochs=epochs("middle"),
        middle_seconds=history.spent["middle"],
        race_epochs=epochs("race") + history.refitted,
        race_seconds=history.spent["race"],
        race_epoch_seconds=median(each) if each else math.nan,
        seconds=seconds,
    )
