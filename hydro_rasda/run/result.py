"""What a run found: the best configuration, its trained model, every trial's record, and what each stage cost."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Group
from torch import nn

from fusion.streams import preserved_generators
from hydro_rasda.config import RASDAConfig
from hydro_rasda.data import Data, batch_length, make_batches
from hydro_rasda.metrics import EVAL_BATCH_FACTOR, mean_metrics
from hydro_rasda.problem import Problem, Trial
from hydro_rasda.run.portable import Gone, dumped, loaded
from hydro_rasda.run.records import Cost, RunRecord, Status, TrialRecord
from hydro_rasda.run.report import render, write_report
from hydro_rasda.run.state import Run, Stage
from hydro_rasda.run.targets import outlooks, run_finished
from hydro_rasda.schedulers import chances, expected_gain, rank


@dataclass(frozen=True, repr=False)
class TuneResult(RunRecord):
    """The outcome of `tune`. It can be pickled; the data stay behind, and the models where the run is.

    `load` opens it again from the run's folder, also before the run is over; then it tells what there is so far.

    Attributes:
        best_config: The configuration whose full-size model has the best metric. With `keep="last"`, of those that
            trained to the end: to `max_t`, unless the time budget ended all before. Where no full-size model has a
            metric yet, that of the surrogate that trained longest, and is best there.
        best_metric: That metric: its best, or with `keep="last"` that after the last epoch (`TrialRecord.kept_epoch`).
            NaN where no full-size model has a metric yet.
        best_trial: Number of the trial with that configuration.
        trials: A record for each configuration, in the order of sampling.
        metric: Name of the metric.
        mode: "min" or "max".
        expected_gain: What training one more configuration to the end at full size would be expected to improve
            `best_metric` by, were it as good as the finalists; NaN where fewer than two trained there.
        cost: What the run cost.
        transfer: How far the surrogates' ranking can be trusted; None unless `check_transfer` was asked for.
        path: The run directory, absolute.
        finished: Whether the run came to its end; False where the time budget ended it before, and where `load` opened
            a run that still goes on, or that was interrupted.
    """

    path: Path
    finished: bool
    _checkpoints: Mapping[int, Path]
    _problem: Problem

    def __repr__(self) -> str:
        statuses = Counter(record.status for record in self.trials)
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        return (
            f"TuneResult(best_config={self.best_config!r},\n"
            f"           {self.metric}={self.best_metric:.6g} ({self.mode}), {len(self.trials)} trials: {counts},\n"
            f"           path={str(self.path)!r})"
        )

    def _packed(self) -> dict[str, Any]:
        problem = self._problem
        gone: dict[str, Any] = {
            "train_data": None,
            "val_data": None,
            "model_fn": Gone("model_fn"),
            "objective": Gone("objective"),
            "plans": {},
            # Its `lr_rule` may be a function, too, and no result calls it.
            "settings": replace(problem.settings, rasda=RASDAConfig()),
        }
        functions = {name: dumped(getattr(problem, name)) for name in ("model_fn", "objective")}
        return {**self.__dict__, "_problem": replace(problem, **gone), "functions": functions}

    def _unpacked(self, state: dict[str, Any]) -> dict[str, Any]:
        functions = {name: loaded(name, packed) for name, packed in state.pop("functions").items()}
        device = state["_problem"].device
        there = device.type != "cuda" or torch.cuda.is_available()
        problem = replace(state["_problem"], device=device if there else torch.device("cpu"), **functions)
        return {**state, "_problem": problem}

    def best_model(self, trial: int | None = None, model_fn: Callable[..., nn.Module] | None = None) -> nn.Module:
        """The trained full-size model, in evaluation mode, on the device that it was trained on.

        Args:
            trial: Number of another finalist whose model is wanted.
            model_fn: The model function of the run, where the result was loaded, or unpickled without it.

        Raises:
            ValueError: where that trial was not trained at full size, or the model function is not there.
            FileNotFoundError: where the run has gone on since it was loaded, and its checkpoint is another one now.
        """
        number = self.best_trial if trial is None else trial
        if number not in self._checkpoints:
            raise ValueError(f"`trial` is {number}, but must be one of the finalists {sorted(self._checkpoints)}")
        checkpoint = self._checkpoints[number]
        if not checkpoint.exists():
            raise FileNotFoundError(
                f"{checkpoint} is gone: where the run has gone on since it was loaded, load it again"
            )
        problem = self._problem if model_fn is None else replace(self._problem, model_fn=model_fn)
        with preserved_generators():
            model = problem.target(Trial(number, self.trials[number].config))
        state = torch.load(checkpoint, map_location=self._problem.device, weights_only=True)
        model.load_state_dict(state.get("best", state)["model"])
        return model.eval()

    def evaluate(self, data: Data, batch_size: int | None = None) -> dict[str, float]:
        """The objective's metrics for the best model, averaged over a data set such as the test set.

        Args:
            data: In any form that `tune` takes.
            batch_size: Examples at a time; None: as many as `tune` validated with, which gives `best_metric` again
                for the validation set, to the last digit (but for rounding where the sweep trained that model to its
                end, fused with others).
        """
        model = self.best_model()
        batches = make_batches(data, "data", self._problem.device, self._problem.settings.seed)
        batch_size = batch_size or EVAL_BATCH_FACTOR * Trial(self.best_trial, self.best_config).batch_size
        with torch.no_grad(), preserved_generators():
            means = mean_metrics(
                (self._problem.objective(model, batch), batch_length(batch)) for batch in batches.in_order(batch_size)
            )
        return {name: float(mean) for name, mean in means.items()}

    def report(self, path: str | Path) -> Path:
        """Write a page (HTML) with the best configuration, the table of trials and the cost; return its path."""
        return write_report(self, Path(path))

    def __rich__(self) -> Group:
        """The table of the best trials and the cost, for a rich console."""
        return render(self)


def make_result(run: Run, finalists: list[int]) -> TuneResult:
    """Sum up a run that is over.

    Raises:
        AllTrialsFailed: where no finalist has a finite metric.
    """
    if not _eligible(run, finalists):
        errors = "\n\n".join(run.failures[n] for n in finalists if n in run.failures)
        raise AllTrialsFailed(
            f"all {len(finalists)} finalists diverged or failed at full size; their records are in "
            f"{run.store.path / 'journal.jsonl'}\n{errors}"
        )
    return sum_up(run, finalists)


def sum_up(run: Run, finalists: list[int], undecided: Collection[int] | None = None) -> TuneResult:
    """What a run has found so far, whatever became of it.

    Args:
        run: Where it stands.
        finalists: All that were trained at full size.
        undecided: Trials that may train on; None where the run is over.
    """
    over, max_t = undecided is None, run.settings.max_t
    at_end = _longest_trained(run, finalists) if over else [n for n in finalists if run.epochs("target", n) >= max_t]
    best, metric = _best(run, finalists)
    found = outlooks(run, finalists)
    chance = chances(found, run.settings.mode)
    return TuneResult(
        best_config=copy.deepcopy(dict(run.trials[best].config)) if best in run.trials else {},
        best_metric=metric,
        trials=tuple(
            _record(run, number, at_end, undecided or (), chance.get(number, math.nan)) for number in sorted(run.trials)
        ),
        metric=run.settings.metric,
        mode=run.settings.mode,
        expected_gain=expected_gain([*found.values()], run.settings.mode),
        cost=_cost(run),
        transfer=run.transfer,
        path=run.store.path,
        best_trial=best,
        finished=run_finished(run),
        _checkpoints={n: run.store.file(name) for n, name in run.checkpoints.items()},
        _problem=run.problem,
    )


def _best(run: Run, finalists: Sequence[int]) -> tuple[int, float]:
    """The best trial and its metric at full size; where none has one, that of the best surrogate, and NaN."""
    if eligible := _eligible(run, finalists):
        metrics = [_kept(run, number)[1] for number in eligible]
        best = rank(metrics, run.settings.mode)[0]
        return eligible[best], metrics[best]
    swept = _longest_trained(run, sorted(run.trials), "surrogate") or [0]
    return swept[rank([run.score("surrogate", n) for n in swept], run.settings.mode)[0]], math.nan


def _eligible(run: Run, finalists: Sequence[int]) -> list[int]:
    return _scored(run, finalists) if run.settings.keep == "best" else _longest_trained(run, finalists)


def _longest_trained(run: Run, numbers: Sequence[int], stage: Stage = "target") -> list[int]:
    """Of the trials that trained with success, those that came furthest: where last weights count, a better score of
    one that was stopped earlier is no promise, as it says nothing of what it would have come to."""
    scored = _scored(run, numbers, stage)
    last = max((run.epochs(stage, n) for n in scored), default=0)
    return [n for n in scored if run.epochs(stage, n) == last]


def _scored(run: Run, numbers: Sequence[int], stage: Stage = "target") -> list[int]:
    return [n for n in numbers if math.isfinite(run.score(stage, n))]


def _kept(run: Run, number: int) -> tuple[int, float]:
    """The full-size epoch whose weights count, and the metric after it."""
    score = run.score("target", number)
    last = run.epochs("target", number), score
    return run.best.get(number, last) if math.isfinite(score) else last


def _record(run: Run, number: int, at_end: Collection[int], undecided: Collection[int], chance: float) -> TrialRecord:
    kept_epoch, metric = _kept(run, number)
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
    )


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

    def epochs(stage: str) -> int:
        return sum(line["stage"] == of == stage for (of, _), lines in run.metrics.items() for line in lines)

    trained = [
        (unit.seconds, sum(line["event"] == "metrics" for line in unit.lines))
        for key, unit in units
        if key.startswith("target/")
    ]
    each = [spent / count for spent, count in trained for _ in range(count)]
    return Cost(
        surrogate_epochs=epochs("surrogate"),
        surrogate_seconds=seconds("surrogate"),
        target_epochs=epochs("target"),
        target_seconds=seconds("target"),
        target_epoch_seconds=median(each) if each else math.nan,
        seconds=max((unit.at for _, unit in units), default=0.0),
    )


class AllTrialsFailed(RuntimeError):
    """No trial of a stage ended with a finite metric."""
