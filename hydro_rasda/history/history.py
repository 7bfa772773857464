"""The history of a run: the fold of its journal's units, in the order in which they finished.

To resume a run is to fold its journal and to go on. Units hold facts and decisions. Facts are epochs, failures,
checkpoints, the kinds of models. They count for as long as the run lives. Decisions of the sweep count until a call of
`tune` asks for more samples. The `call` unit of that call begins the sweep's state anew. Trials that have trained
before then come to their milestones at once.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from hydro_rasda.config import TuneConfig
from hydro_rasda.history.lines import JournalLine, Stage, Unit, number_of, score_in
from hydro_rasda.history.unkept_values import changed, restored
from hydro_rasda.schedulers import SweepState
from hydro_rasda.secret_masking import Place
from hydro_rasda.trial import Trial

CALL = "call"
"""Key of the unit with which a call of `tune` begins to decide the sweep anew."""

ADMITTED = "surrogate/admitted"
"""Beginning of the names of units that let configurations into the sweep."""

FINALISTS = "surrogate/finalists"
"""Key of the decision that ends the sweep."""

SCHEDULES = "surrogate/schedules"
"""Beginning of the journal's name of the unit that has, by finalist, the trial whose schedule it trains by."""

KINDS_FROM, KIND_OF = "surrogate/kinds-from-", "surrogate/kind-of-"
"""Beginnings of the names of units that tell which trials can train as one: of many, and of one that is built again."""

DONE = "target/done"

SWEEP_DECISION = re.compile(r"surrogate/(?:begin|to-(?P<epoch>\d+)/kept)/of-.*")
"""Pattern of the journal's names of the sweep's decisions."""

GROUP = re.compile(r"surrogate/to-(?P<stop>\d+)/from-(?P<start>\d+)/group-\d+(?:/again)*")
"""Pattern of the journal's names of groups that trained."""

TARGET = re.compile(r"target/trial-(?P<trial>\d+)/(?P<what>to|failed-after|done-after|lost-after)-(?P<epoch>\d+)")
"""Pattern of the journal's names of full-size trainings."""

REFIT = re.compile(r"target/refit-(?P<trial>\d+)/to-\d+")


def is_decision(key: str) -> bool:
    """Tell whether a unit of this name decides on trials of the sweep."""
    return key.startswith(ADMITTED) or key == FINALISTS or SWEEP_DECISION.fullmatch(key) is not None


class History:
    """The content of a run's journal, as far as `take` has taken in its units.

    Attributes:
        settings: The settings of the run.
        own_loop: True if a function of the user's trains at full size.
        trials: All configurations so far, by number.
        unkept: Places of the values of each trial that JSON does not keep.
        unread: Keys of each trial's configuration that nothing reads; nested ones are written `a.b`.
        costs: Costs of each trial's full-size model that trials are compared by; see `comparison_of_trials.COSTS`.
        kinds: Digests by trial; two are equal if the trials can train as one fused model.
        metrics: The journal's lines by stage and trial, one an epoch.
        failed: Tracebacks by stage and trial, of the trials that raised.
        sweep: The state of the sweep, as its rule sees it.
        decisions: Number of decisions on trials of the sweep.
        samples: `num_samples` of the call that decides the sweep; None before the first trial is admitted.
        copies: Maps each trial that goes on with another trial's weights, and has not trained since, to that trial.
        finalists: The trials that the sweep chose; None while it is not over.
        sources: Names of the checkpoints from which trials of the sweep can go on. Once the sweep is done, only
            finalists are left whose full-size training can begin there (`sweep.surrogate=1`).
        checkpoints: Name of the last checkpoint of each trial that trained at full size.
        refits: Name of the checkpoint of the model that was trained once more on the examples of all folds, by trial.
        best: With `keep="best"`, the epoch whose weights each of these checkpoints keeps, and its metric.
        ended: Epochs at which full-size trainings ended by themselves, by trial.
        decided: Maps each full-size trial at an epoch with a decision to whether it goes on.
        last: Key of the last unit.
        last_target: Key of the last unit of the full-size stage.
        over: The finalists of a full-size stage that has come to its end.
        left: The last estimate of the seconds that the run still takes; None if it was not known.
        seconds: Wall time of the run at its last unit.
        spent: Seconds of the units of each stage.
        epoch_seconds: Mean seconds of an epoch of one model, and the number of such epochs, of each full-size unit.
        checked: Values of the units of the transfer check, by name.
        refitted: Epochs of models that were trained once more on the examples of all folds.
    """

    def __init__(
        self,
        settings: TuneConfig,
        own_loop: bool = False,
        known: Mapping[int, Trial] | None = None,
        reads_any: bool = False,
    ) -> None:
        """Begin an empty history.

        Args:
            known: Trials with the objects of the space; others are made of what the journal has of them.
            reads_any: True if a function of the user's may read any key.
        """
        self.settings, self.own_loop = settings, own_loop
        self._known, self._reads_any = {} if known is None else known, reads_any
        self.trials: dict[int, Trial] = {}
        self.unkept: dict[int, frozenset[Place]] = {}
        self.unread: dict[int, frozenset[str]] = {}
        self.costs: dict[int, Mapping[str, float]] = {}
        self.kinds: dict[int, str] = {}
        self.metrics: dict[tuple[Stage, int], list[JournalLine]] = {}
        self.failed: dict[tuple[Stage, int], str] = {}
        self.sweep = self.new_sweep()
        self.decisions = 0
        self.samples: int | None = None
        self.copies: dict[int, int] = {}
        self.finalists: list[int] | None = None
        self.sources: dict[int, str] = {}
        self.checkpoints: dict[int, str] = {}
        self.refits: dict[int, str] = {}
        self.best: dict[int, tuple[int, float]] = {}
        self.ended: dict[int, int] = {}
        self.decided: dict[int, bool] = {}
        self.last = self.last_target = ""
        self.over: list[int] | None = None
        self.left: float | None = None
        self.seconds = 0.0
        self.spent: dict[Stage, float] = {"surrogate": 0.0, "target": 0.0}
        self.epoch_seconds: list[tuple[float, int]] = []
        self.refitted = 0
        self.checked: dict[str, Any] = {}
        self._behind: dict[str, Mapping[str, int]] = {}
        self._uses = Counter[str]()
        self._released: list[str] = []
        self._begun: set[Stage] = set()
        self._unplaced: set[int] = set()

    def new_sweep(self) -> SweepState:
        """Return the state of a sweep, or of the race, before its first trial."""
        settings = self.settings
        mode = "min" if settings.comparison.by_place else settings.mode
        return SweepState(mode, settings.max_t, settings.race.top_k, settings.seed)

    def take(self, key: str, unit: Unit) -> None:
        """Take in a unit that was finished after all that were taken in before; the time that it takes is bounded by
        the unit's own size."""
        stage: Stage = "target" if key.startswith("target/") else "surrogate"
        self.last, self.left, self.seconds = key, unit.left, max(self.seconds, unit.at)
        if key.startswith(f"{stage}/"):
            self.spent[stage] += unit.seconds
        for line in unit.lines:
            self._take_line(stage, line)
        if stage == "target":
            self.last_target = key
            self._take_full_size(key, unit)
        elif GROUP.fullmatch(key) is not None:
            self._take_group(key, unit)
        elif SWEEP_DECISION.fullmatch(key) is not None:
            self.decisions += 1
            self._take_moves(unit.value)
        elif key.startswith(ADMITTED):
            self.samples = unit.value["samples"]
            for number in unit.value["trials"]:
                self.sweep.admit(number, self.trials[number].config)
        elif key.startswith((KINDS_FROM, KIND_OF)):
            self.kinds |= {int(number): kind for number, kind in unit.value.items()}
        elif key == CALL:
            self.samples, self.finalists = unit.value["samples"], None
            self.sweep, self.copies, self._unplaced = self.new_sweep(), {}, set()
        elif key == FINALISTS:
            self.finalists = unit.value
            go_on = unit.value if self.settings.sweep.surrogate == 1 else ()
            self._forget([number for number in self.sources if number not in go_on])
        elif key.startswith(SCHEDULES):
            self._take_schedules(unit.value)
        elif key.startswith("check/"):
            self.checked.pop(key, None)
            self.checked[key] = unit.value

    def _take_line(self, stage: Stage, line: JournalLine) -> None:
        event, number = line["event"], line["trial"]
        if event == "metrics":
            known = self.metrics.setdefault((line["stage"], number), [])
            # If epochs were trained again, from a checkpoint before them, their last training counts.
            while known and known[-1]["epoch"] >= line["epoch"]:
                known.pop()
            known.append(line)
            self._begun.add(line["stage"])
        elif event == "trial":
            self._configure(line)
        elif event == "failed":
            self.failed[stage, number] = line["error"]
        elif event == "retried":
            self.failed.pop((stage, number), None)

    def _configure(self, line: JournalLine) -> None:
        number, noted = line["trial"], line.get("literals", [])
        if (known := self._known.get(number)) is not None:
            self.trials[number] = known
        else:
            self.trials[number] = Trial(number, restored(line["config"], noted))
            self.unkept[number] = frozenset(tuple(place) for place, literal in noted if literal is None)
        if not self._reads_any:
            self.unread[number] = frozenset(line.get("unread", ()))
        self.costs[number] = {name: number_of(cost) for name, cost in line.get("costs", {}).items()}

    def _take_group(self, key: str, unit: Unit) -> None:
        members, failed = unit.value["members"], {line["trial"] for line in unit.lines if line["event"] == "failed"}
        if "behind" in unit.value:
            self._behind[key] = unit.value["behind"]
        for number in members:
            self.copies.pop(number, None)
            self._set(self.sources, number, None if number in failed else key)
        self.sweep.spent += sum(line["event"] == "metrics" for line in unit.lines)
        if key not in self._uses:  # all have failed
            self._released.append(key)
        self._arrive(members)

    def _take_moves(self, moves: Sequence[Sequence[Any]]) -> None:
        """Take in what was decided on trials, as `plain_move` has it.

        Those that copy others get their weights as they were before any copy.
        """
        stopped = [number for number, to, *_ in moves if to is None]
        going_on = [(number, to, *copy) for number, to, *copy in moves if to is not None]
        copies = [(number, *copy) for number, _, *copy in going_on if copy]
        before = {source: (self.trials[source], self.sources.get(source)) for _, source, _ in copies}
        for number in stopped:
            self.sweep.drop(number)
        for number, source, changes in copies:
            trial, checkpoint = before[source]
            self.failed.pop(("surrogate", number), None)
            self.trials[number] = Trial(number, changed(trial.config, changes))
            self.unkept[number] = self.unkept.get(source, frozenset())
            self.unread[number] = self.unread.get(source, frozenset())
            self.costs[number], self.kinds[number] = self.costs.get(source, {}), self.kinds[source]
            self.copies[number] = source
            self._set(self.sources, number, checkpoint)
        self._forget(stopped)
        for number, to, *copy in going_on:
            self.sweep.go_on(number, to, self.trials[number].config, *copy[:1])
        self._arrive([number for number, *_ in going_on])

    def _take_schedules(self, racing: Iterable[tuple[int, int, Mapping[str, Any]]]) -> None:
        """Take in the finalists of a population: who trains by whose schedule, and with which changes."""
        for number, source, changes in racing:
            self.trials[number] = Trial(number, changed(self.trials[source].config, changes))
            self.unkept[number] = self.unkept.get(source, frozenset())

    def _arrive(self, numbers: Iterable[int]) -> None:
        """Let trials wait at their milestones if they have reached them, perhaps in an earlier call.

        With fewer samples, an earlier call may have trained them further. The rule does not see those epochs.
        """
        by_place = self.settings.comparison.by_place
        for number in numbers:
            standing = self.sweep.training.get(number)
            if standing is None or standing.goal is None or number in self.copies:
                continue
            if not self.passed("surrogate", number, goal := standing.goal):
                continue
            if by_place:
                self._unplaced.add(goal)
                whole = all(map(math.isfinite, self.values_at("surrogate", number, goal).values()))
                self.sweep.come(number, {goal: 0.0 if whole else math.nan})
            else:
                epochs = range(standing.epoch + 1, goal + 1)
                self.sweep.come(number, {epoch: self.score_at("surrogate", number, epoch) for epoch in epochs})

    def place(self) -> None:
        """If one score does not order trials, place those that came to a milestone anew once more have come there."""
        for stop in sorted(self._unplaced):
            values = {number: self.values_at("surrogate", number, stop) for number in self.sweep.scores[stop]}
            self.sweep.place(stop, self.settings.comparison.places(values))
        self._unplaced.clear()

    def _take_full_size(self, key: str, unit: Unit) -> None:
        if (name := TARGET.fullmatch(key)) is not None:
            self._take_target(int(name["trial"]), name["what"], int(name["epoch"]), unit)
        elif (name := REFIT.fullmatch(key)) is not None:
            for number in list(self.refits):
                self._set(self.refits, number, None)
            self._set(self.refits, int(name["trial"]), key)
            self.refitted += unit.value["epochs"]
        elif (decision := _KEPT.fullmatch(key)) is not None:
            there = [n for n in self.checkpoints if self.epochs("target", n) == int(decision[1])]
            self.decided |= {number: to is not None for number, to in unit.value if number in there}
        elif key == DONE:
            self.over = unit.value
        if count := sum(line["event"] == "metrics" for line in unit.lines):
            count *= self.settings.models("target")
            self.epoch_seconds.append((unit.seconds / count, count))

    def _take_target(self, number: int, what: str, epoch: int, unit: Unit) -> None:
        if what == "done-after":
            self.ended[number], self.decided[number] = epoch, False
        elif what == "lost-after":
            self._set(self.checkpoints, number, None)
            self.best.pop(number, None)
            self.metrics.pop(("target", number), None)
        elif what == "to":
            self.failed.pop(("surrogate", number), None)
            self.failed.pop(("target", number), None)
            self._set(self.checkpoints, number, unit.value["checkpoint"])
            self.decided.pop(number, None)
            if (best := unit.value.get("best")) is not None:
                self.best[number] = best["epoch"], best["score"]
            if unit.value.get("swept"):
                swept = self.metrics["surrogate", number]
                self.metrics["target", number] = [line for line in swept if line["epoch"] <= epoch]
                self._begun.add("target")

    def _set(self, names: dict[int, str], number: int, name: str | None) -> None:
        """Let a trial go on from a checkpoint, or from none; one that no trial needs any more is released."""
        before = names.pop(number, None)
        if name is not None:
            names[number] = name
            self._uses[name] += 1
        if before is not None:
            self._uses[before] -= 1
            if not self._uses[before]:
                del self._uses[before]
                self._released.append(before)

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._set(self.sources, number, None)

    def released(self) -> Iterator[str]:
        """Yield, once, the names of checkpoints from which nothing goes on any more."""
        released, self._released = self._released, []
        yield from (name for name in released if name not in self._uses)

    @property
    def failures(self) -> dict[int, str]:
        """By trial that raised in either stage, the traceback."""
        return {number: error for (_, number), error in self.failed.items()}

    def line_at(self, stage: Stage, number: int, epoch: int) -> JournalLine | None:
        """Return a trial's line of an epoch; None if it has not trained it."""
        lines = self.metrics.get((stage, number))
        if not lines or epoch > lines[-1]["epoch"]:
            return None
        if 0 < epoch <= len(lines) and lines[epoch - 1]["epoch"] == epoch:
            return lines[epoch - 1]
        at = bisect_left(lines, epoch, key=itemgetter("epoch"))
        return lines[at] if lines[at]["epoch"] == epoch else None

    def epochs(self, stage: Stage, number: int) -> int:
        """Count the epochs that a trial has trained in a stage."""
        lines = self.metrics.get((stage, number))
        return int(lines[-1]["epoch"]) if lines else 0

    def epochs_in(self, key: str, number: int) -> int:
        """Count the epochs of the sweep that a trial had trained in a checkpoint.

        They are fewer than those recorded if an earlier checkpoint was lost, and time ended the training after it.
        """
        return self._behind.get(key, {}).get(str(number), self.epochs("surrogate", number))

    def has_failed(self, stage: Stage, number: int) -> bool:
        """Tell whether a trial raised by a stage: in the sweep, or at full size."""
        return ("surrogate", number) in self.failed or (stage == "target" and ("target", number) in self.failed)

    def diverged(self, stage: Stage, number: int) -> bool:
        """Tell whether the training loss of a trial was not finite in its last epoch."""
        lines = self.metrics.get((stage, number))
        return lines[-1].get("train_loss", 0.0) is None if lines else False

    def score(self, stage: Stage, number: int) -> float:
        """Return the metric after a trial's last epoch; NaN if it diverged, failed or never began."""
        if self.has_failed(stage, number):
            return math.nan
        return self.score_at(stage, number, self.epochs(stage, number))

    def score_at(self, stage: Stage, number: int, epoch: int) -> float:
        """Return the metric after an epoch; NaN if the trial had diverged, or has none there."""
        line = self.line_at(stage, number, epoch)
        return math.nan if line is None else self.score_of(line)

    def score_of(self, line: JournalLine, metric: str | None = None) -> float:
        """Return the metric, or another one, in a line of the journal; NaN if the trial had diverged."""
        return number_of(score_in(line, metric or self.settings.metric))

    def values_at(self, stage: Stage, number: int, epoch: int, suffix: str = "") -> dict[str, float]:
        """Return all that a trial is compared by after an epoch; NaN for a metric that it has not, or has no more.

        Args:
            suffix: Of the metrics' names, where an epoch has them with it; see `config.unaveraged`.
        """
        found: dict[str, float] = {**self.costs.get(number, {})}
        line = self.line_at(stage, number, epoch) or {}
        for name in self.settings.comparison.trained:
            there = name + suffix if name + suffix in line else name
            found[name] = self.score_of(line, there) if there in line else math.nan
        return found

    def passed(self, stage: Stage, number: int, epoch: int) -> bool:
        """Tell whether a trial is through with an epoch: it trained the epoch, or diverged or failed before."""
        trained = self.line_at(stage, number, epoch) is not None
        return trained or self.has_failed(stage, number) or self.diverged(stage, number)

    def curve(self, stage: Stage, number: int) -> dict[int, float]:
        """Return the metric by epoch; NaN if the trial had diverged, or has none there."""
        lines = self.metrics.get((stage, number), ())
        return {line["epoch"]: self.score_of(line) for line in lines}

    def began(self, stage: Stage) -> bool:
        """Tell whether any trial has trained an epoch of a stage."""
        return stage in self._begun


_KEPT = re.compile(r"target/to-(\d+)/kept.*")
