"""A run in progress: its problem, folder and history, and the callbacks that receive its events."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hydro_rasda.common.heat_names import HeatName, RunPart
from hydro_rasda.common.secret_masking import Place, hide, scrubbed
from hydro_rasda.common.short_values import show
from hydro_rasda.common.trial import Trial
from hydro_rasda.history.history import History
from hydro_rasda.history.lines import Unit, decision_key
from hydro_rasda.history.unkept_values import literals
from hydro_rasda.run import events
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.time_left import TimeLeft, roughly
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.settings.objectives import PLACE
from hydro_rasda.space.space import derived

if TYPE_CHECKING:  # imports torch, and reading a journal should not wait for that
    from hydro_rasda.problem.problem import Problem

SWEEP_SHARE = 0.5
"""Share of a time budget that the sweep may spend; the rest trains the finalists."""


@dataclass
class Run:
    """A run in progress.

    Attributes:
        space: The space of configurations as `tune` received it: domains by name.
        hidden: Places of secrets in configurations (see `Place`). No file, event or message shows the secrets.
        known: Trials by number, as the search made them. Their configurations hold the objects of the space.
        history: The content of the journal. `fold` adds the units that earlier processes wrote.
        time_left: The estimate of the time left, from the planned and the trained epochs of the heats.
    """

    problem: Problem
    store: Store
    callbacks: events.Callbacks = field(default_factory=events.Callbacks)
    known: dict[int, Trial] = field(default_factory=dict)
    space: Mapping[str, Any] = field(default_factory=dict)
    hidden: Collection[Place] = ()
    time_left: TimeLeft = field(default_factory=TimeLeft)
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        own_loop = self.problem.own_loop is not None
        # A user's training function, or a function that derives values, may read any key. Then none counts as unread.
        self.history = History(self.settings, own_loop, self.known, reads_any=own_loop or bool(derived(self.space)))

    @property
    def settings(self) -> TuneConfig:
        return self.problem.settings

    def fold(self, hear: Callable[[str, Unit], None] = lambda key, unit: None) -> None:
        """Add the units of earlier processes to the history, and remove checkpoints that no trial needs any more.

        Args:
            hear: Called with each unit, after it is added.
        """
        for key, unit in self.store.folded_into(self.history):
            hear(key, unit)
        self.store.discard(self.history.released())

    def unit(self, key: str, work: Callable[[], Unit]) -> Unit:
        """Do a unit of work once per run, and record it. If it was done before, return the recorded unit."""
        if self.store.done(key):
            return self.store.units()[key]
        began = perf_counter()
        unit = work()
        return self.record(key, replace(unit, seconds=perf_counter() - began))

    def record(self, key: str, unit: Unit, again: bool = False) -> Unit:
        """Record a finished unit of work in the journal and the history; see `Store.record`."""
        unit = self.store.record(key, self._as_kept(unit), again)
        self.history.take(key, unit)
        self.store.discard(self.history.released())
        self._notify_lines(unit)
        return unit

    def _as_kept(self, unit: Unit) -> Unit:
        """Hide secrets in a unit, and add literals for configuration values that JSON cannot keep."""
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

    def decide(self, key: str, candidates: Iterable[int], decision: Callable[[], Iterable[int]]) -> list[int]:
        """Make a decision about trials once per run. If it was made before, return the recorded decision.

        A decision about other candidates is a separate one. So a run with more samples or more time decides anew, but
        keeps its trainings.
        """
        chosen: list[int] = self.unit(decision_key(key, candidates), lambda: Unit([*decision()])).value
        return chosen

    def save(self, key: str, state: Mapping[str, Any], trials: Iterable[int]) -> None:
        """Write the checkpoint of a unit of work, before the unit is recorded."""
        self.store.save(key, state)
        self.notify(events.CheckpointSaved, heat=key.partition("/")[0], trials=tuple(trials), path=self.store.file(key))

    def notify(self, event: type[events.Event], **values: Any) -> None:
        """Send the callbacks an event that happens now."""
        if self.callbacks:
            self.callbacks.notify(event(**{"seconds": self.store.seconds, **values}))

    def notify_recalled(self) -> None:
        """Send the callbacks the events of trials and epochs that earlier processes recorded."""
        for unit in self.store.units().values():
            self._notify_lines(unit, recalled=True)

    def _notify_lines(self, unit: Unit, recalled: bool = False) -> None:
        when = {"seconds": unit.at, "recalled": recalled}
        for line in unit.lines if self.callbacks else ():
            if line["event"] == "metrics":
                metrics = {name: value for name, value in line.items() if name not in PLACE}
                place = {name: line[name] for name in ("heat", "trial", "epoch")}
                self.notify(events.EpochEnded, metrics=metrics, **place, **when)
            elif line["event"] == "trial":
                self.notify(events.TrialConfigured, trial=line["trial"], config=copy.deepcopy(line["config"]), **when)
            elif line["event"] == "failed":
                self.notify(events.TrialFailed, trial=line["trial"], error=line["error"], **when)

    def say(self, text: str) -> None:
        """Send the user a line of text, and store it."""
        text = self._scrubbed(text)
        self.store.keep_message(text)
        self.notify(events.MessageSaid, text=text)

    def begin_heat(self, heat: RunPart, epochs: int) -> None:
        """Announce a heat, or the transfer check, that trains `epochs` epochs, over all of its trials."""
        self.time_left.begin(heat, self.store.seconds)
        self.notify(events.HeatBegan, heat=heat, epochs=epochs)

    def end_heat(self) -> None:
        """Announce the end of the heat that began last."""
        self.notify(events.HeatEnded)

    def advance(self, epochs: int, note: str = "") -> None:
        """Announce epochs that were just trained; the journal records them later."""
        seconds, most = self.store.seconds, max(0.0, self.seconds_left("race"))
        self.time_left.advance(epochs, seconds)
        # Send this message without storing it, because it is soon out of date.
        if (news := self.time_left.news(seconds, most)) is not None:
            self.notify(events.MessageSaid, text=f"About {roughly(news)} left.")
        self.store.left = left = self.time_left.left(seconds, most)
        self.notify(events.EpochsTrained, seconds=seconds, epochs=epochs, note=note, seconds_left=left)

    def can_load(self, key: str) -> bool:
        """Tell whether a checkpoint exists and is undamaged; report damage once."""
        if not self.store.has(key):
            return False
        if (damage := self.store.damage(key)) and key not in self._told:
            self._told.add(key)
            self.say(f"{damage}: what it held trains again")
        return not damage

    def out_of_time(self, heat: HeatName) -> bool:
        """Tell whether a heat may not begin more work, because the time budget or the sweep's share of it is spent."""
        return self.seconds_left(heat) <= 0

    def seconds_left(self, heat: HeatName) -> float:
        """Return the seconds that a heat may still take of the time budget; infinite without a budget.

        Time of earlier, interrupted sessions counts as spent. Only the sweep's own time counts against its share, so
        that the same call with more time also resumes the sweep.
        """
        if (budget := self.settings.time_budget_s) is None:
            return math.inf
        left = budget - self.store.seconds
        return left if heat == "race" else min(left, SWEEP_SHARE * budget - self.store.swept)

    def end_by_time(self, heat: HeatName) -> None:
        """Record that a heat's time is spent. A repeated call with the same budget then trains nothing more."""
        key = f"{heat}/ended-by-{self.settings.time_budget_s}s"
        if heat == "race":
            self.end_by(key)
        else:
            self.unit(key, lambda: Unit(None))

    def end_by(self, key: str, value: Any = None) -> None:
        """Record how the run has ended as its last unit, unless the last unit already says so."""
        if self.history.last != key or self.store.units()[key].value != value:
            self.record(key, Unit(value), again=True)

    def note(self, metrics: Mapping[str, Iterable[float]]) -> str:
        """Return an epoch's best metric among the trials that trained together, in words; empty if none is finite."""
        finite = [value for value in metrics[self.settings.metric] if math.isfinite(value)]
        if not finite:
            return ""
        best = min(finite) if self.settings.mode == "min" else max(finite)
        return f"{self.settings.metric} {show(best, 4)}"
