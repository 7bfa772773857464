"""A run in progress: what is tuned, how far each trial is, and what all of it has cost."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from surrogate import RankComparison

from .config import TuneConfig
from .problem import Problem, Trial
from .progress import Progress
from .store import Line, Store, Unit

Stage = Literal["surrogate", "target"]

SWEEP_SHARE = 0.5
"""Of a time budget, what the sweep may spend; the rest trains the finalists."""


@dataclass
class Run:
    """What the stages share.

    Attributes:
        problem: What is tuned.
        settings: How.
        store: The run directory.
        progress: What the user sees.
        trials: All configurations so far, by number.
        metrics: Of each stage and trial, the journal's lines, one an epoch.
        failures: Of each trial that raised, the traceback.
        sources: Of each trial that the sweep may go on with, the name of the checkpoint that holds it; once the sweep
            is done, of the finalists whose full-size training can begin there (`surrogate=1`).
        checkpoints: Of each trial that trained at full size, the name of its last checkpoint.
        best: Where `keep="best"`: of each of those, the epoch whose weights that checkpoint keeps, and its metric.
        transfer: How far the surrogates' ranking can be trusted, where that was asked for.
        derived: Whether the space computes values from others (`sample_from`): a key may then matter though nothing
            reads it of a configuration.
    """

    problem: Problem
    settings: TuneConfig
    store: Store
    progress: Progress
    trials: dict[int, Trial] = field(default_factory=dict)
    metrics: dict[tuple[Stage, int], list[Line]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    checkpoints: dict[int, str] = field(default_factory=dict)
    best: dict[int, tuple[int, float]] = field(default_factory=dict)
    transfer: RankComparison | None = None
    derived: bool = False

    def unit(self, key: str, work: Callable[[], Unit]) -> Unit:
        """Do a unit of work once in the life of the run, and take in what it says of its trials."""
        return self._taken_in(self.store.once(key, work))

    def record(self, key: str, unit: Unit, again: bool = False) -> Unit:
        """Take in a unit of work that was done elsewhere; see `Store.record`."""
        return self._taken_in(self.store.record(key, unit, again))

    def recall(self, key: str) -> Unit:
        """Take in a unit of work that an earlier process recorded."""
        return self._taken_in(self.store.units()[key])

    def _taken_in(self, unit: Unit) -> Unit:
        for line in unit.lines:
            if line["event"] == "metrics":
                known = self.metrics.setdefault((line["stage"], line["trial"]), [])
                # Epochs that were trained again, from a checkpoint before them, count as they went the last time.
                while known and known[-1]["epoch"] >= line["epoch"]:
                    known.pop()
                known.append(line)
            elif line["event"] == "failed":
                self.failures[line["trial"]] = line["error"]
        return unit

    def decide(self, key: str, candidates: Iterable[int], decision: Callable[[], Iterable[int]]) -> list[int]:
        """Take a decision about trials once in the life of the run; over other candidates, it is another decision.

        So a run with more samples or more time decides anew, whereas what it has trained counts.

        Args:
            key: Names the decision, such as "surrogate/to-3/kept".
            candidates: The trials that it is taken over, in any order.
            decision: Takes it: those that go on, best first.
        """
        chosen: list[int] = self.store.once(decision_key(key, candidates), lambda: list(decision())).value
        return chosen

    def go_on_from(self, key: str, members: Iterable[int], failed: Collection[int]) -> None:
        """Have trials of the sweep go on from a checkpoint, now that it is recorded; all but those that failed."""
        members = list(members)
        before = {key, *(self.sources.pop(n) for n in members if n in self.sources)}
        self.sources |= dict.fromkeys((n for n in members if n not in failed), key)
        self._discard(before)

    def forget(self, numbers: Iterable[int]) -> None:
        """Have trials of the sweep go on no more."""
        self._discard({self.sources.pop(n) for n in list(numbers) if n in self.sources})

    def _discard(self, keys: Iterable[str]) -> None:
        needed = set(self.sources.values())
        self.store.discard(key for key in keys if key not in needed)

    def epochs(self, stage: Stage, number: int) -> int:
        """Epochs that a trial has trained in a stage."""
        lines = self.metrics.get((stage, number))
        return int(lines[-1]["epoch"]) if lines else 0

    def score(self, stage: Stage, number: int) -> float:
        """The metric after a trial's last epoch; NaN where it diverged, failed or never began."""
        return math.nan if number in self.failures else self.score_at(stage, number, self.epochs(stage, number))

    def score_at(self, stage: Stage, number: int, epoch: int) -> float:
        """The metric after an epoch; NaN where the trial had diverged, or has none there."""
        for line in self.metrics.get((stage, number), ()):
            if line["epoch"] == epoch and line["train_loss"] is not None:
                value = line[self.problem.metric]
                return math.nan if value is None else float(value)
        return math.nan

    def passed(self, stage: Stage, number: int, epoch: int) -> bool:
        """Whether a trial is through with an epoch: it trained it, or diverged or failed before."""
        trained = any(line["epoch"] == epoch for line in self.metrics.get((stage, number), ()))
        began = self.epochs(stage, number) > 0
        return trained or number in self.failures or (began and math.isnan(self.score(stage, number)))

    def curve(self, stage: Stage, number: int) -> dict[int, float]:
        """The metric by epoch; NaN where it was not finite."""
        values = {line["epoch"]: line[self.problem.metric] for line in self.metrics.get((stage, number), ())}
        return {epoch: math.nan if value is None else float(value) for epoch, value in values.items()}

    def out_of_time(self, stage: Stage) -> bool:
        """Whether a stage may begin no more work: the time budget is spent, or the sweep's share of it."""
        return self.seconds_left(stage) <= 0

    def seconds_left(self, stage: Stage) -> float:
        """What a stage has left of the time budget, interrupted sessions included; infinite without one.

        The sweep's share counts what the sweep took: full-size training does not eat it up, so that the same call with
        more time goes on with the sweep, too.
        """
        budget = self.settings.time_budget_s
        if budget is None:
            return math.inf
        left = budget - self.store.seconds
        return left if stage == "target" else min(left, SWEEP_SHARE * budget - self.store.swept)

    def end_by_time(self, stage: Stage) -> None:
        """Put down that a stage's time is spent, so that the same call finds it spent, and trains nothing more."""
        self.store.once(f"{stage}/ended-by-{self.settings.time_budget_s}s", lambda: None)

    def note(self, metrics: Mapping[str, Iterable[float]]) -> str:
        """An epoch in a few words: the best value of the metric among those that trained together."""
        finite = [value for value in metrics[self.problem.metric] if math.isfinite(value)]
        if not finite:
            return ""
        best = min(finite) if self.problem.mode == "min" else max(finite)
        return f"{self.problem.metric} {best:.4g}"


def decision_key(key: str, candidates: Iterable[int]) -> str:
    """Name in the journal of a decision over these trials, in any order.

    >>> decision_key("surrogate/to-3/kept", [2, 0, 5])
    'surrogate/to-3/kept/of-3-483537'
    """
    among = sorted(candidates)
    return f"{key}/of-{len(among)}-{hashlib.sha256(repr(among).encode()).hexdigest()[:6]}"


def metric_lines(stage: Stage, number: int, history: Iterable[tuple[int, Mapping[str, Any]]]) -> list[Line]:
    """A trial's epochs as the journal keeps them."""
    return [
        {"event": "metrics", "stage": stage, "trial": number, "epoch": epoch, **metrics} for epoch, metrics in history
    ]
