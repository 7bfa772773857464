"""A run in progress: its problem, the progress of each trial, and the time spent."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hydro_rasda.config import TuneConfig
from hydro_rasda.run.callbacks import Callbacks
from hydro_rasda.run.events import (
    CheckpointSaved,
    EpochEnded,
    EpochsTrained,
    Event,
    MessageSaid,
    StageBegan,
    StageEnded,
    TrialConfigured,
    TrialFailed,
)
from hydro_rasda.run.events import Stage as Stage
from hydro_rasda.run.journal import JournalLine, Unit, number_of, score_in
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.time_left import TimeLeft, roughly, seconds_left
from hydro_rasda.run.unkept_values import literals
from hydro_rasda.secret_masking import Place, hide, scrubbed
from hydro_rasda.short_values import show
from hydro_rasda.trial import Trial

if TYPE_CHECKING:  # imports torch, for which reading a journal need not wait
    from hydro_rasda.problem import Problem
    from surrogate.transfer_verdict import RankComparison

FINALISTS = "surrogate/finalists"
"""Key of the decision that ends the sweep."""

_PLACE = ("event", "stage", "trial", "epoch")


@dataclass
class Run:
    """The state that the stages share.

    Attributes:
        trials: All configurations so far, by number.
        metrics: By stage and trial, the journal's lines, one an epoch.
        failures: By trial that raised, the traceback.
        costs: By trial, the costs of the full-size model that trials are compared by; see `comparison_of_trials.COSTS`.
        unread: By trial, the keys of its configuration that nothing reads; nested ones are written `a.b`.
        sources: By trial that the sweep may go on with, the name of the checkpoint that holds it. Once the sweep is
            done, only finalists are left whose full-size training can begin there (`sweep.surrogate=1`).
        checkpoints: By trial that trained at full size, the name of its last checkpoint.
        refits: By trial whose model was trained once more on the examples of all folds, the name of that checkpoint.
        best: With `keep="best"`, by the same trials: the epoch whose weights the checkpoint keeps, and its metric.
        transfer: How far the surrogates' ranking can be trusted; None unless it was checked.
        space: The space of the trials' configurations: domains by name, as `tune` was given them.
        hidden: Places of secrets in configurations; no file, event or message shows them.
        unkept: By trial of a run that was read from its folder, the places of values that JSON does not keep.
        time_left: The estimate of the time left, from the plans and epochs of the stages.
    """

    problem: Problem
    store: Store
    callbacks: Callbacks = field(default_factory=Callbacks)
    trials: dict[int, Trial] = field(default_factory=dict)
    metrics: dict[tuple[Stage, int], list[JournalLine]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    costs: dict[int, Mapping[str, float]] = field(default_factory=dict)
    unread: dict[int, frozenset[str]] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    checkpoints: dict[int, str] = field(default_factory=dict)
    refits: dict[int, str] = field(default_factory=dict)
    best: dict[int, tuple[int, float]] = field(default_factory=dict)
    transfer: RankComparison | None = None
    space: Mapping[str, Any] = field(default_factory=dict)
    hidden: Collection[Place] = ()
    unkept: dict[int, frozenset[Place]] = field(default_factory=dict)
    time_left: TimeLeft = field(default_factory=TimeLeft)
    _told: set[str] = field(default_factory=set)

    @property
    def settings(self) -> TuneConfig:
        return self.problem.settings

    def unit(self, key: str, work: Callable[[], Unit]) -> Unit:
        """Do a unit of work once in the life of the run, and take in its trials' lines."""
        known = self.store.done(key)
        unit = self._taken_in(self.store.once(key, lambda: self._as_kept(work())))
        if not known:
            self._notify_lines(unit)
        return unit

    def record(self, key: str, unit: Unit, again: bool = False) -> Unit:
        """Take in a unit of work that was done elsewhere; see `Store.record`."""
        recorded = self._taken_in(self.store.record(key, self._as_kept(unit), again))
        self._notify_lines(recorded)
        return recorded

    def _as_kept(self, unit: Unit) -> Unit:
        """Hide a unit's secrets, and note the values of configurations that JSON does not keep."""
        lines = []
        for line in unit.lines:
            if "config" in line:
                config = hide(line["config"], self.hidden)
                noted = literals(config)
                line = {**line, "config": config, **({"literals": noted} if noted else {})}
            lines.append({**line, "error": self._scrubbed(line["error"])} if "error" in line else line)
        return replace(unit, lines=lines)

    def _scrubbed(self, text: str) -> str:
        return scrubbed(text, self.hidden, self.space)

    def recall(self, key: str) -> Unit:
        """Take in a unit of work that an earlier process recorded."""
        return self._taken_in(self.store.units()[key])

    def _taken_in(self, unit: Unit) -> Unit:
        for line in unit.lines:
            if line["event"] == "metrics":
                known = self.metrics.setdefault((line["stage"], line["trial"]), [])
                # If epochs were trained again, from a checkpoint before them, their last training counts.
                while known and known[-1]["epoch"] >= line["epoch"]:
                    known.pop()
                known.append(line)
            elif line["event"] == "trial":
                self.unread[line["trial"]] = frozenset(line.get("unread", ()))
                costs = line.get("costs", {})
                self.costs[line["trial"]] = {name: math.nan if of is None else of for name, of in costs.items()}
            elif line["event"] == "failed":
                self.failures[line["trial"]] = line["error"]
            elif line["event"] == "retried":
                self.failures.pop(line["trial"], None)
        return unit

    def decide(self, key: str, candidates: Iterable[int], decision: Callable[[], Iterable[int]]) -> list[int]:
        """Take a decision about trials once in the life of the run.

        Over other candidates, it is another decision: a run with more samples or more time decides anew, but keeps its
        trainings.
        """
        chosen: list[int] = self.store.once(decision_key(key, candidates), lambda: list(decision())).value
        return chosen

    def decided(self, key: str, candidates: Iterable[int]) -> bool:
        """Tell whether the journal has a decision over these trials; see `decide`."""
        return self.store.done(decision_key(key, candidates))

    def save(self, key: str, state: Mapping[str, Any], trials: Iterable[int]) -> None:
        """Write the checkpoint of a unit of work, before the unit is recorded."""
        self.store.save(key, state)
        self.notify(CheckpointSaved, stage=key.partition("/")[0], trials=tuple(trials), path=self.store.file(key))

    def notify(self, event: type[Event], **values: Any) -> None:
        """Give the callbacks an event that happens now."""
        if self.callbacks:
            self.callbacks.notify(event(**{"seconds": self.store.seconds, **values}))

    def notify_recalled(self) -> None:
        """Give the callbacks the events of trials and epochs that earlier processes recorded."""
        for unit in self.store.units().values():
            self._notify_lines(unit, recalled=True)

    def _notify_lines(self, unit: Unit, recalled: bool = False) -> None:
        when = {"seconds": unit.at, "recalled": recalled}
        for line in unit.lines if self.callbacks else ():
            if line["event"] == "metrics":
                metrics = {name: value for name, value in line.items() if name not in _PLACE}
                place = {name: line[name] for name in ("stage", "trial", "epoch")}
                self.notify(EpochEnded, metrics=metrics, **place, **when)
            elif line["event"] == "trial":
                self.notify(TrialConfigured, trial=line["trial"], config=copy.deepcopy(line["config"]), **when)
            elif line["event"] == "failed":
                self.notify(TrialFailed, trial=line["trial"], error=line["error"], **when)

    def say(self, text: str) -> None:
        """Send the user a line, and keep it."""
        text = self._scrubbed(text)
        self.store.keep_message(text)
        self.notify(MessageSaid, text=text)

    def begin_stage(self, title: str, epochs: int) -> None:
        """Announce a part of the run that trains `epochs` epochs, over all of its trials."""
        self.time_left.begin(title, self.store.seconds)
        self.notify(StageBegan, title=title, epochs=epochs)

    def end_stage(self) -> None:
        """Announce the end of the part that began last."""
        self.notify(StageEnded)

    def advance(self, epochs: int, note: str = "") -> None:
        """Announce epochs that were trained just now, before the journal has them."""
        seconds = self.store.seconds
        self.time_left.advance(epochs, seconds)
        if (news := self.time_left.news(seconds)) is not None:  # not kept: soon it is not true any more
            self.notify(MessageSaid, text=f"About {roughly(news)} left.")
        self.store.left = left = self.time_left.left(seconds)
        self.notify(EpochsTrained, seconds=seconds, epochs=epochs, note=note, seconds_left=left)

    def can_load(self, key: str) -> bool:
        """Tell whether a checkpoint is there and undamaged; say once that the work of a damaged one trains again."""
        if not self.store.has(key):
            return False
        if (damage := self.store.damage(key)) and key not in self._told:
            self._told.add(key)
            self.say(f"{damage}: what it held trains again")
        return not damage

    def go_on_from(self, key: str, members: Iterable[int], failed: Collection[int]) -> None:
        """Let trials of the sweep, but for failed ones, go on from a checkpoint that is recorded now."""
        members = list(members)
        before = {key, *(self.sources.pop(n) for n in members if n in self.sources)}
        self.sources |= dict.fromkeys((n for n in members if n not in failed), key)
        self._discard(before)

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget from where trials of the sweep go on: they go on no more."""
        self._discard({self.sources.pop(n) for n in list(numbers) if n in self.sources})

    def _discard(self, keys: Iterable[str]) -> None:
        needed = set(self.sources.values())
        self.store.discard(key for key in keys if key not in needed)

    def epochs(self, stage: Stage, number: int) -> int:
        """Count the epochs that a trial has trained in a stage."""
        lines = self.metrics.get((stage, number))
        return int(lines[-1]["epoch"]) if lines else 0

    def epochs_in(self, key: str, number: int) -> int:
        """Count the epochs of the sweep that a trial had trained in a checkpoint.

        They are fewer than those recorded if an earlier checkpoint was lost, and time ended the training after it.
        """
        behind: Mapping[str, int] = self.store.units()[key].value.get("behind", {})
        return behind.get(str(number), self.epochs("surrogate", number))

    def diverged(self, stage: Stage, number: int) -> bool:
        """Tell whether the training loss of a trial was not finite in its last epoch."""
        *_, last = self.metrics.get((stage, number)) or [{}]
        return last.get("train_loss", 0.0) is None

    def score(self, stage: Stage, number: int) -> float:
        """Return the metric after a trial's last epoch; NaN if it diverged, failed or never began."""
        return math.nan if number in self.failures else self.score_at(stage, number, self.epochs(stage, number))

    def score_at(self, stage: Stage, number: int, epoch: int) -> float:
        """Return the metric after an epoch; NaN if the trial had diverged, or has none there."""
        for line in self.metrics.get((stage, number), ()):
            if line["epoch"] == epoch:
                return self.score_of(line)
        return math.nan

    def score_of(self, line: JournalLine, metric: str | None = None) -> float:
        """Return the metric, or another one, in a line of the journal; NaN if the trial had diverged."""
        return number_of(score_in(line, metric or self.settings.metric))

    def values_at(self, stage: Stage, number: int, epoch: int, suffix: str = "") -> dict[str, float]:
        """Return all that a trial is compared by after an epoch; NaN for a metric that it has not, or has no more.

        Args:
            suffix: Of the metrics' names, where an epoch has them with it; see `config.unaveraged`.
        """
        found: dict[str, float] = {**self.costs.get(number, {})}
        line = next((line for line in self.metrics.get((stage, number), ()) if line["epoch"] == epoch), {})
        for name in self.settings.comparison.trained:
            there = name + suffix if name + suffix in line else name
            found[name] = self.score_of(line, there) if there in line else math.nan
        return found

    def passed(self, stage: Stage, number: int, epoch: int) -> bool:
        """Tell whether a trial is through with an epoch: it trained the epoch, or diverged or failed before."""
        trained = any(line["epoch"] == epoch for line in self.metrics.get((stage, number), ()))
        return trained or number in self.failures or self.diverged(stage, number)

    def curve(self, stage: Stage, number: int) -> dict[int, float]:
        """Return the metric by epoch; NaN if the trial had diverged, or has none there."""
        lines = self.metrics.get((stage, number), ())
        return {line["epoch"]: self.score_of(line) for line in lines}

    def out_of_time(self, stage: Stage) -> bool:
        """Tell whether a stage may begin no more work: the time budget, or the sweep's share of it, is spent."""
        return self.seconds_left(stage) <= 0

    def seconds_left(self, stage: Stage) -> float:
        """Return a stage's seconds left of the time budget, which counts interrupted sessions; infinite without one."""
        return seconds_left(self.settings.time_budget_s, stage, self.store.seconds, self.store.swept)

    def end_by_time(self, stage: Stage) -> None:
        """Record that a stage's time is spent, so that the same call trains nothing more."""
        key = f"{stage}/ended-by-{self.settings.time_budget_s}s"
        if stage == "target":
            self.end_by(key)
        else:
            self.store.once(key, lambda: None)

    def end_by(self, key: str, value: Any = None) -> None:
        """Record, as the last unit, how the run has ended, unless the last unit says so already."""
        units = self.store.units()
        if next(reversed([*units]), "") != key or units[key].value != value:
            self.record(key, Unit(value), again=True)

    def note(self, metrics: Mapping[str, Iterable[float]]) -> str:
        """Sum up an epoch in a few words: the best value of the metric among the trials that trained together."""
        finite = [value for value in metrics[self.settings.metric] if math.isfinite(value)]
        if not finite:
            return ""
        best = min(finite) if self.settings.mode == "min" else max(finite)
        return f"{self.settings.metric} {show(best, 4)}"


def decision_key(key: str, candidates: Iterable[int]) -> str:
    """Return the journal's name of a decision over these trials, in any order.

    >>> decision_key("target/to-3/kept", [2, 0, 5])
    'target/to-3/kept/of-3-483537'
    """
    among = sorted(candidates)
    return f"{key}/of-{len(among)}-{hashlib.sha256(repr(among).encode()).hexdigest()[:6]}"


def metric_lines(stage: Stage, number: int, history: Iterable[tuple[int, Mapping[str, Any]]]) -> list[JournalLine]:
    """Return a trial's epochs as lines of the journal."""
    return [
        {"event": "metrics", "stage": stage, "trial": number, "epoch": epoch, **metrics} for epoch, metrics in history
    ]


def retry_key(number: int) -> str:
    """Return the name of the unit that takes back a failure of building a trial's model, which is then built again."""
    return f"surrogate/retry-of-{number}"


ERROR_CHARS = 20_000
"""Most characters of a traceback that are kept: a quarter from its beginning, the others from its end."""


def failure_line(number: int, error: str) -> JournalLine:
    """Return the line that the journal keeps of a failed trial."""
    return {"event": "failed", "trial": number, "error": shortened(error)}


def shortened(error: str) -> str:
    """Bound the length of a traceback: the `repr` of a big object in it may have millions of characters."""
    if len(error) <= ERROR_CHARS:
        return error
    first, last = error[: ERROR_CHARS // 4], error[-3 * ERROR_CHARS // 4 :]
    return f"{first}\n[{len(error) - len(first) - len(last)} characters are left out]\n{last}"
