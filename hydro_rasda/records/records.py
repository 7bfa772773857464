"""The findings of a run, as plain values: a record for each trial, and the run's cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hydro_rasda.common.argument_checks import is_number, require
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.secret_masking import Place, hide
from hydro_rasda.history.lineage import Ancestor, lineages, schedule_of, smoothed
from hydro_rasda.run.journal import Message, read_messages
from hydro_rasda.run.pickling import Portable
from hydro_rasda.run.run_folder import Store
from hydro_rasda.schedulers import Agreement
from hydro_rasda.schedulers.pareto import hypervolume, losses
from hydro_rasda.schedulers.ranking import ranked
from hydro_rasda.settings.config import HISTORY, Keep, Mode
from hydro_rasda.settings.objectives import Comparison

if TYPE_CHECKING:
    from typing import Self

    import pandas as pd

    from surrogate.transfer_verdict import RankComparison

Status = Literal["finished", "stopped", "undecided", "not begun", "diverged", "failed"]


@dataclass(frozen=True)
class TrialRecord(Portable):
    """The outcome of one configuration.

    Attributes:
        status: A "finished" trial trained at full size to the last milestone, to its own end (`patience`), or as far as
            the time budget went. A "stopped" trial was dropped by halving. An "undecided" trial may train further,
            because the run is not over. A trial that has "not begun" was not trained, because the time budget ended
            before or the run is not over. The metric or training loss of a "diverged" trial became infinite or NaN. A
            "failed" trial raised an error.
        sweep_metric: The metric after its last epoch on the surrogate; NaN if it has none.
        middle_metric: The metric after its last epoch in the middle heat (`full_trainings` below 3); else NaN.
        metric: The metric after `kept_epoch` at full size; NaN without such an epoch. With `keep="best"`, a trial has
            one even if it diverged or failed later.
        epochs: Epochs trained at full size. They include those of the sweep if it trained the same model
            (`sweep.surrogate=1`).
        chance: Probability that the trial would be the best at full size if no trial had been stopped; NaN if it did
            not train at full size.
        kept_epoch: The epoch whose weights, averaged or not (`ema`), `best_model` gives: the last, or with
            `keep="best"` the best one.
        history: One dict for each epoch: heat, epoch, and the metrics "train_*" and "val_*" (None if not finite). With
            folds or `sweep.repeats`, they are means over the trial's models. The standard deviation of the metric over
            these models has a key of its own, such as "val_loss_std".
        live: The epochs at full size since the trial's last checkpoint, in the form of `history`, while the run goes
            on. No other attribute counts these epochs. After an interruption, they are trained again.
        error: Traceback of a failed trial.
        costs: Costs of the full-size model by which trials are compared, such as `macs` (see `metric` of `tune`).
        unread: Keys of the configuration that nothing reads, such as `momentum` with adamw; nested ones are written
            `a.b`. Empty if a user's function may read any key.
        spread: Standard deviation of `metric` over the trial's models (folds or seeds). It is that of `sweep_metric` if
            the trial did not train at full size. None if the trial has one model.
    """

    trial: int
    config: Mapping[str, Any]
    status: Status
    sweep_metric: float
    sweep_epochs: int
    metric: float
    epochs: int
    chance: float
    kept_epoch: int
    history: tuple[Mapping[str, Any], ...] = field(repr=False)
    error: str | None = field(repr=False)
    unread: tuple[str, ...] = field(default=(), repr=False)
    spread: float | None = field(default=None, repr=False)
    costs: Mapping[str, float] = field(default_factory=dict, repr=False, kw_only=True)
    live: tuple[Mapping[str, Any], ...] = field(default=(), repr=False, kw_only=True)
    middle_metric: float = field(default=math.nan, repr=False, kw_only=True)
    middle_epochs: int = field(default=0, repr=False, kw_only=True)

    @property
    def reached(self) -> int:
        """Epochs trained at full size, including those that no checkpoint holds yet."""
        return self.live[-1]["epoch"] if self.live else self.epochs

    @property
    def metrics(self) -> dict[str, float]:
        """`costs`, and the metrics after `kept_epoch`. Without full-size epochs, the last metrics on the surrogate."""
        epoch = self.kept_epoch if self.epochs else self.sweep_epochs
        lines = [line for line in self.history if line["epoch"] == epoch]
        full = [line for line in lines if line["heat"] == "race"] if self.epochs else []
        (line, *_) = full or lines or [{}]
        named = {name: value for name, value in line.items() if name not in NO_METRICS}
        return {name: math.nan if value is None else value for name, value in named.items()} | {**self.costs}

    @property
    def used(self) -> dict[str, Any]:
        """The configuration without `unread` keys: values by name, nested names as `a/b`."""
        unread = {name.replace("/", ".") for name in self.unread}  # compare with dots, as a key itself may have a slash
        return {name: value for name, value in flat(self.config).items() if name.replace("/", ".") not in unread}

    def __eq__(self, other: object) -> bool:
        # NaN does not equal NaN. If fields were compared as they are, a record with a NaN would not equal its own copy.
        return isinstance(other, TrialRecord) and _comparable(self) == _comparable(other)


def _comparable(record: TrialRecord) -> list[Any]:
    return [None if isinstance(value, float) and math.isnan(value) else value for value in vars(record).values()]


@dataclass(frozen=True)
class Cost:
    """The cost of a run: the epochs of each heat, and its wall time in seconds.

    Attributes:
        sweep_epochs: Epochs trained on surrogates, over all trials and, with folds or `repeats`, all their models.
        race_epochs: Epochs trained at full size after the sweep, over the finalists and all their models.
        race_epoch_seconds: Median wall time of an epoch at full size; NaN if none was trained.
        seconds: Wall time of the whole run up to its last finished unit of work, including interrupted sessions. While
            the run goes on, a later epoch of a full-size model counts, too.
        middle_epochs: Epochs trained in the middle heat (`full_trainings` below 3), over its trials and their models.
    """

    sweep_epochs: int
    sweep_seconds: float
    race_epochs: int
    race_seconds: float
    race_epoch_seconds: float
    seconds: float
    middle_epochs: int = 0
    middle_seconds: float = 0.0

    @property
    def spared_seconds(self) -> float:
        """Estimate of the saved time: that of the same sweep at full size, one trial at a time, minus the sweep's time.

        Each epoch of the sweep counts as the median wall time of this run's full-size epochs. NaN without such epochs.
        """
        return self.sweep_epochs * self.race_epoch_seconds - self.sweep_seconds

    def full_trainings(self, seconds: float, max_t: int) -> float:
        """Convert a time of this run to full trainings: `max_t` epochs at the mean pace of its full-size epochs.

        NaN if no epoch was trained at full size.
        """
        if not self.race_epochs or self.race_seconds <= 0 or not max_t:
            return math.nan
        return seconds * self.race_epochs / (self.race_seconds * max_t)


@dataclass(frozen=True, repr=False)
class RunRecord(Portable):
    """The part of a `TuneResult` that needs neither model nor data. `TuneResult` explains its attributes."""

    best_config: dict[str, Any]
    best_metric: float
    best_trial: int
    trials: tuple[TrialRecord, ...]
    metric: str
    mode: Mode
    expected_gain: float
    cost: Cost
    transfer: RankComparison | None
    agreement: Agreement | None
    path: Path
    finished: bool
    ended: bool
    _checkpoints: Mapping[int, Path]
    keep: Keep = field(default="best", kw_only=True)
    averaged: bool | None = field(default=None, kw_only=True)
    seconds_left: float | None = field(default=None, kw_only=True)
    max_t: int = field(default=0, kw_only=True)
    over: str = field(default="", kw_only=True)
    _hidden: frozenset[Place] = field(default=frozenset(), kw_only=True)
    _unkept: Mapping[int, frozenset[Place]] = field(default_factory=dict, kw_only=True)
    _comparison: Comparison | None = field(default=None, kw_only=True)
    _needed: Sequence[Path] = field(default=(), kw_only=True)  # checkpoints from which the run can resume

    def shown(self) -> Self:
        """Return a copy of the record that others may see: the secrets in its configurations are masked."""
        if not self._hidden:
            return self
        trials = [replace(trial, config=hide(trial.config, self._hidden)) for trial in self.trials]
        return replace(self, best_config=hide(self.best_config, self._hidden), trials=tuple(trials))

    @property
    def best_checkpoint(self) -> Path | None:
        """The file that `best_model` reads; None if the best trial has not been trained at full size.

        `torch.load` gives a dict: "model" is the state dict after the last epoch. If the best epoch is kept,
        `["best"]["model"]` is the state dict after that epoch.
        """
        return self._checkpoints.get(self.best_trial)

    @property
    def comparison(self) -> Comparison:
        """The metrics by which trials were compared, each with its mode, and the bounds of `sweep.constraints`."""
        return self._comparison or Comparison(((self.metric, self.mode),))

    @property
    def others(self) -> list[str]:
        """The names of the other metrics and bounds by which trials were compared, without `metric`."""
        names = [*(name for name, _ in self.comparison.objectives), *self.comparison.bounds]
        return [name for name in dict.fromkeys(names) if name != self.metric]

    @property
    def pareto(self) -> tuple[TrialRecord, ...]:
        """The Pareto front of the full-size models by all metrics of `tune`: the models that no other model dominates.

        A record's `metrics` has its values, and `best_model(trial=record.trial)` is its model. The best in the first
        metric comes first. Models that break a bound are included only if no model keeps all bounds.
        """
        able = {trial.trial: trial for trial in self.trials if trial.epochs and math.isfinite(trial.metric)}
        front = self.comparison.front({number: trial.metrics for number, trial in able.items()})
        return tuple(able[number] for number in front)

    def hypervolume(self, reference: Mapping[str, float]) -> float:
        """Return the hypervolume between the Pareto front and a reference point; a better front has a larger one.

        Args:
            reference: For each metric that `tune` was given, a value that is worse than the front's.

        Raises:
            ValueError: if a metric is missing.
        """
        names, modes = zip(*self.comparison.objectives, strict=True)
        known = isinstance(reference, Mapping) and all(is_number(reference.get(name)) for name in names)
        require(known, "reference", reference, f"a dict with a number for each of {[*names]}")
        points = [[trial.metrics[name] for name in names] for trial in self.pareto]
        worst = losses([reference[name] for name in names], modes)
        return hypervolume([losses(point, modes) for point in points], worst)

    @property
    def messages(self) -> list[Message]:
        """The messages of the run to its user, in order; each has a line of text and the seconds of the run."""
        return read_messages(self.path)

    def lineage(self, trial: int) -> list[Ancestor]:
        """Follow a trial's weights through the sweep's copies, as population based training makes them.

        Returns:
            The trials that trained the weights, in the order of training, with their epochs and configurations. The
            last is `trial` itself; without copies, it is the only one. A finalist that trains by another trial's
            schedule has that trial's lineage.

        Raises:
            ValueError: if the run has no such trial, or its folder is gone.
        """
        require(self.path.is_dir(), "path", str(self.path), "a run's folder: it is gone")
        epochs = {record.trial: record.sweep_epochs for record in self.trials}
        found = lineages(Store.read(self.path).units(), epochs)
        require(trial in found, "trial", trial, f"a trial of the run: one of {[*found]}")
        return found[trial]

    @property
    def best_schedule(self) -> dict[str, list[tuple[float, Any]]]:
        """The changes of hyperparameters in the best trial's lineage, in the sweep.

        Each key that changed has a list of pairs `(share, value)`. The value held from this share of the sweep's epochs
        on. Empty if the sweep copied no trial of the lineage. Finalists train at full size by `smoothed_schedule`.
        """
        return schedule_of(self.lineage(self.best_trial))

    @property
    def smoothed_schedule(self) -> dict[str, Any]:
        """`best_schedule` condensed to a few values of a configuration, which suit a training of any length.

        Learning rates become `lr`, `decay_start` and `floor` of a linear decay; each other key gets its mean.
        """
        return smoothed(self.lineage(self.best_trial))

    def dataframe(self) -> pd.DataFrame:
        """Return one row for each trial: number, status, scores, epochs, other metrics, and columns `config/<name>`."""
        import pandas as pd

        rows = [row(trial, self.others) for trial in self.trials]
        return pd.DataFrame(rows, columns=None if rows else [*COLUMNS])

    def curves(self) -> pd.DataFrame:
        """Return the learning curves: one row for each trial, heat, epoch and metric.

        Columns: `trial`; `heat`, "sweep", "middle" or "race"; `epoch`, from 1; `metric`, such as "train_loss"
        or "val_loss"; and `value`, NaN if it was not finite.
        """
        import pandas as pd

        rows = [
            (record.trial, line["heat"], line["epoch"], name, value)
            for record in self.trials
            for line in record.history
            for name, value in line.items()
            if name not in NO_METRICS
        ]
        frame = pd.DataFrame(rows, columns=["trial", "heat", "epoch", "metric", "value"])
        return frame.astype({"value": float})


DIFFER = "trials {} and {} differ by "
"""Beginning of a run's message about the sampling error of its two best trials."""

NO_METRICS = ("heat", "epoch", *HISTORY)
"""Keys of a history's lines that are no metrics. A metric of `tune(train=...)` may have any other name."""

COLUMNS = ("trial", "status", "sweep_metric", "sweep_epochs", "metric", "epochs", "chance", "kept_epoch")
MIDDLE_COLUMNS = ("middle_metric", "middle_epochs")


def row(record: TrialRecord, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return a trial as a row of the table: its numbers, other metrics, and `config/<name>` for each hyperparameter.

    A trial of the middle heat also has the columns `middle_metric` and `middle_epochs`.
    """
    config = {f"config/{name}": value for name, value in flat(record.config).items()}
    spread = {} if record.spread is None else {"spread": record.spread}
    own = {name: record.metrics.get(name, math.nan) for name in others}
    middle = {name: getattr(record, name) for name in MIDDLE_COLUMNS if record.middle_epochs}
    return {name: getattr(record, name) for name in COLUMNS} | middle | spread | own | config


def in_heat(record: TrialRecord, heat: HeatName) -> tuple[float, int]:
    """Return a trial's score in a heat, and the epochs that it trained there."""
    if heat == "sweep":
        return record.sweep_metric, record.sweep_epochs
    return (record.middle_metric, record.middle_epochs) if heat == "middle" else (record.metric, record.epochs)


def by_heat(cost: Cost) -> dict[HeatName, tuple[int, float]]:
    """Map each heat to its epochs and its seconds; the middle heat is left out if it trained nothing."""
    found: dict[HeatName, tuple[int, float]] = {"sweep": (cost.sweep_epochs, cost.sweep_seconds)}
    if cost.middle_epochs:
        found["middle"] = cost.middle_epochs, cost.middle_seconds
    return found | {"race": (cost.race_epochs, cost.race_seconds)}


def winner_of(record: RunRecord) -> TrialRecord | None:
    """Return the record of the best trial; None if no trial has begun."""
    return next((trial for trial in record.trials if trial.trial == record.best_trial), None)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values: `{"a": {"b": 1}}` becomes `{"a/b": 1}`."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        leaves |= flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def second_of(result: RunRecord) -> int | None:
    """Return the best trial after the winner among those that trained to the end at full size; None without one."""
    ends = {r.trial: r.metric for r in result.trials if r.status == "finished" and math.isfinite(r.metric)}
    ends.pop(result.best_trial, None)
    return next(iter(ranked(ends, result.mode)), None)
