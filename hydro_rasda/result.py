"""What a run found: the best configuration, its trained model, every trial's record, and what each stage cost."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch
from ray import cloudpickle
from rich.console import Group
from torch import nn

from fusion.streams import preserved_generators
from surrogate import RankComparison

from .data import Data, batch_length, make_batches
from .problem import Problem, Trial
from .report import render, write_report
from .run import Run
from .schedulers import rank
from .sweep import AllTrialsFailed
from .train import EVAL_BATCH_FACTOR, mean_metrics

if TYPE_CHECKING:
    import pandas as pd

Status = Literal["finished", "stopped", "not begun", "diverged", "failed"]


class _Gone:
    """Stands for a function that could not come along with a pickled result."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"`{self._name}` did not come along when this result was pickled, or cannot be found here; "
            "`best_model(model_fn=...)` takes it"
        )


class _Portable:
    """What pickle takes to another process, with functions that plain pickle cannot take."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), cloudpickle.dumps(self._packed()))

    def _packed(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def _unpacked(self, state: dict[str, Any]) -> dict[str, Any]:
        return state


def _restored(cls: type[_Portable], packed: bytes) -> _Portable:
    made = cls.__new__(cls)
    made.__dict__.update(made._unpacked(cloudpickle.loads(packed)))
    return made


@dataclass(frozen=True)
class TrialRecord(_Portable):
    """What became of one configuration.

    Attributes:
        trial: Its number.
        config: The configuration.
        status: "finished": trained at full size to the last milestone, or as far as the time budget went; "stopped":
            halved away; "not begun": never trained, as the time budget ended before; "diverged": its metric or training
            loss was no longer finite; "failed": it raised.
        surrogate_metric: The metric after its last epoch on the surrogate; NaN where it has none.
        surrogate_epochs: Epochs trained on the surrogate.
        metric: The metric after `kept_epoch` at full size; NaN where it has none.
        epochs: Epochs trained at full size, those of the sweep included where it went on from there (`surrogate=1`).
        kept_epoch: The epoch whose weights `best_model` gives: the last, or the best one where `keep="best"`.
        history: One dict an epoch: stage, epoch, and the metrics "train_*" and "val_*" (None where not finite).
        error: Traceback of a failed trial.
    """

    trial: int
    config: Mapping[str, Any]
    status: Status
    surrogate_metric: float
    surrogate_epochs: int
    metric: float
    epochs: int
    kept_epoch: int
    history: tuple[Mapping[str, Any], ...] = field(repr=False)
    error: str | None = field(repr=False)


@dataclass(frozen=True)
class Cost:
    """What the run cost.

    Attributes:
        surrogate_epochs: Epochs trained on surrogates, over all trials.
        surrogate_seconds: Wall time of the sweep.
        target_epochs: Epochs trained at full size after the sweep, over the finalists.
        target_seconds: Wall time of the full-size trainings.
        target_epoch_seconds: Median wall time of an epoch at full size; NaN where none was trained.
        seconds: Wall time of the whole run, interrupted sessions included.
    """

    surrogate_epochs: int
    surrogate_seconds: float
    target_epochs: int
    target_seconds: float
    target_epoch_seconds: float
    seconds: float

    @property
    def spared_seconds(self) -> float:
        """Estimate of what the sweep would have taken at full size, one trial after another, less what it took.

        The sweep's epochs times the median wall time of an epoch of this run's own full-size trainings; NaN where
        there is none.
        """
        return self.surrogate_epochs * self.target_epoch_seconds - self.surrogate_seconds


@dataclass(frozen=True, repr=False)
class TuneResult(_Portable):
    """The outcome of `tune`. It can be pickled; the data stay behind, and the models where the run is.

    Attributes:
        best_config: Of the configurations whose full-size models trained to the end, to `max_t` unless the time budget
            ended all before, the one with the best metric.
        best_metric: That metric: after its last epoch, or its best where `keep="best"` (`TrialRecord.kept_epoch`).
        trials: A record for each configuration, in the order of sampling.
        metric: Name of the metric.
        mode: "min" or "max".
        cost: What the run cost.
        transfer: How far the surrogates' ranking can be trusted; None unless `check_transfer` was asked for.
        path: The run directory, absolute.
    """

    best_config: dict[str, Any]
    best_metric: float
    trials: tuple[TrialRecord, ...]
    metric: str
    mode: Literal["min", "max"]
    cost: Cost
    transfer: RankComparison | None
    path: Path
    _best: int
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
        gone = {"train_data": None, "val_data": None, "model_fn": _Gone("model_fn"), "objective": _Gone("objective")}
        functions = {name: _dumped(getattr(problem, name)) for name in ("model_fn", "objective")}
        return {**self.__dict__, "_problem": replace(problem, **gone), "functions": functions}  # type: ignore[arg-type]

    def _unpacked(self, state: dict[str, Any]) -> dict[str, Any]:
        functions = {name: _loaded(name, packed) for name, packed in state.pop("functions").items()}
        device = state["_problem"].device
        there = device.type != "cuda" or torch.cuda.is_available()
        problem = replace(state["_problem"], device=device if there else torch.device("cpu"), **functions)
        return {**state, "_problem": problem}

    def best_model(self, trial: int | None = None, model_fn: Callable[..., nn.Module] | None = None) -> nn.Module:
        """The trained full-size model, in evaluation mode, on the device that it was trained on.

        Args:
            trial: Number of another finalist whose model is wanted.
            model_fn: The model function of the run, where the result was unpickled without it.

        Raises:
            ValueError: where that trial was not trained at full size, or the model function is not there.
        """
        number = self._best if trial is None else trial
        if number not in self._checkpoints:
            raise ValueError(f"`trial` is {number}, but must be one of the finalists {sorted(self._checkpoints)}")
        problem = self._problem if model_fn is None else replace(self._problem, model_fn=model_fn)
        with preserved_generators():
            model = problem.target(Trial(number, self.trials[number].config))
        state = torch.load(self._checkpoints[number], map_location=self._problem.device, weights_only=True)
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
        batches = make_batches(data, "data", self._problem.device, self._problem.seed)
        batch_size = batch_size or EVAL_BATCH_FACTOR * Trial(self._best, self.best_config).batch_size
        with torch.no_grad(), preserved_generators():
            means = mean_metrics(
                (self._problem.objective(model, batch), batch_length(batch)) for batch in batches.in_order(batch_size)
            )
        return {name: float(mean) for name, mean in means.items()}

    def dataframe(self) -> pd.DataFrame:
        """One row a trial: number, status, scores, epochs, and a column `config/<name>` for each hyperparameter."""
        import pandas as pd

        rows = [
            {name: getattr(record, name) for name in _COLUMNS}
            | {f"config/{name}": value for name, value in _flat(record.config).items()}
            for record in self.trials
        ]
        return pd.DataFrame(rows)

    def report(self, path: str | Path) -> Path:
        """Write a page (HTML) with the best configuration, the table of trials and the cost; return its path."""
        return write_report(self, Path(path))

    def __rich__(self) -> Group:
        """The table of the best trials and the cost, for a rich console."""
        return render(self)


def _dumped(function: Any) -> bytes | None:
    try:
        packed: bytes = cloudpickle.dumps(function)
    except Exception:  # whatever a `__reduce__` raises: it holds an open file, say
        return None
    return packed


def _loaded(name: str, packed: bytes | None) -> Any:
    try:
        return _Gone(name) if packed is None else cloudpickle.loads(packed)
    except (ImportError, AttributeError):  # its module is not there, or does not have it any more
        return _Gone(name)


_COLUMNS = ("trial", "status", "surrogate_metric", "surrogate_epochs", "metric", "epochs", "kept_epoch")


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def make_result(run: Run, finalists: list[int]) -> TuneResult:
    """Sum up a run that is over.

    Raises:
        AllTrialsFailed: where no finalist has a finite metric.
    """
    longest = _longest_trained(run, finalists)
    if not longest:
        errors = "\n\n".join(run.failures[n] for n in finalists if n in run.failures)
        raise AllTrialsFailed(
            f"all {len(finalists)} finalists diverged or failed at full size; their records are in "
            f"{run.store.path / 'journal.jsonl'}\n{errors}"
        )
    best = longest[rank([_kept(run, number)[1] for number in longest], run.settings.mode)[0]]
    return TuneResult(
        best_config=copy.deepcopy(dict(run.trials[best].config)),
        best_metric=_kept(run, best)[1],
        trials=tuple(_record(run, number, finalists) for number in sorted(run.trials)),
        metric=run.settings.metric,
        mode=run.settings.mode,
        cost=_cost(run),
        transfer=run.transfer,
        path=run.store.path,
        _best=best,
        _checkpoints={n: run.store.file(name) for n, name in run.checkpoints.items()},
        _problem=run.problem,
    )


def _longest_trained(run: Run, finalists: Sequence[int]) -> list[int]:
    """Of the finalists that trained with success, those that came furthest: a better score of one that was stopped
    earlier is no promise, as it says nothing of what it would have come to."""
    scored = [n for n in finalists if math.isfinite(run.score("target", n))]
    last = max((run.epochs("target", n) for n in scored), default=0)
    return [n for n in scored if run.epochs("target", n) == last]


def _kept(run: Run, number: int) -> tuple[int, float]:
    """The full-size epoch whose weights count, and the metric after it."""
    score = run.score("target", number)
    last = run.epochs("target", number), score
    return run.best.get(number, last) if math.isfinite(score) else last


def _record(run: Run, number: int, finalists: list[int]) -> TrialRecord:
    kept_epoch, metric = _kept(run, number)
    return TrialRecord(
        trial=number,
        config=run.trials[number].config,
        status=_status(run, number, finalists),
        surrogate_metric=run.score("surrogate", number),
        surrogate_epochs=run.epochs("surrogate", number),
        metric=metric,
        epochs=run.epochs("target", number),
        kept_epoch=kept_epoch,
        history=tuple(
            {name: value for name, value in line.items() if name not in ("event", "trial")}
            for stage in ("surrogate", "target")
            for line in run.metrics.get((stage, number), ())
            if line["stage"] == stage
        ),
        error=run.failures.get(number),
    )


def _status(run: Run, number: int, finalists: list[int]) -> Status:
    if number in run.failures:
        return "failed"
    if not run.epochs("surrogate", number) and not run.epochs("target", number):
        return "not begun"
    stage: Literal["surrogate", "target"] = "target" if run.epochs("target", number) else "surrogate"
    if not math.isfinite(run.score(stage, number)):
        return "diverged"
    return "finished" if number in _longest_trained(run, finalists) else "stopped"


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
        seconds=run.store.seconds,
    )
