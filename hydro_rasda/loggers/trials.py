"""The part that loggers share: the events of a run, told trial by trial."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydro_rasda.results.records import STAGES, flat
from hydro_rasda.run.events import (
    EpochEnded,
    Event,
    FinalistsChosen,
    RunBegan,
    RunEnded,
    RungDecided,
    TrialConfigured,
    TrialEnded,
    TrialFailed,
)


@dataclass
class Logged:
    """A trial as far as it is known: its flat configuration, and the last epoch and metrics ("sweep/val_loss") of each
    stage."""

    number: int
    config: dict[str, Any] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Epochs that it has trained, on both stages: a counter that only grows."""
        return sum(self.epochs.values())


class TrialLogger:
    """Follows each trial from its first new epoch until it is dropped, fails, or the run is over.

    Events that an earlier process of the run logged are not logged again. A trial that was closed and trains on is
    opened again.
    """

    def __init__(self) -> None:
        self._trials: dict[int, Logged] = {}
        self._open: set[int] = set()
        self._closed: set[int] = set()

    def begin(self, event: RunBegan) -> None:
        """The run begins, or goes on."""

    def logged(self, trial: int, stage: str) -> float:
        """The last epoch that an earlier process logged; infinite where only the run knows: all that it recalls."""
        return math.inf

    def open(self, trial: Logged) -> None:
        """A trial is about to log its first epoch of this process, or to be closed."""

    def log(self, trial: Logged, stage: str, epoch: int, metrics: Mapping[str, float], seconds: float) -> None:
        """A trial has trained an epoch of the stage "sweep" or "full size"; metrics that are not finite are NaN."""
        raise NotImplementedError

    def close(self, trial: Logged, status: str) -> None:
        """A trial will log no more, as far as is known: "stopped", "failed", "finished" or "interrupted"."""

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunBegan):
            self._trials, self._open, self._closed = {}, set(), set()
            self.begin(event)
        elif isinstance(event, TrialConfigured):
            self._trials.setdefault(event.trial, Logged(event.trial)).config = flat(event.config)
        elif isinstance(event, EpochEnded):
            self._take_in(event)
        elif isinstance(event, RunEnded):
            for number in sorted(self._open if event.error else self._trials):
                self._close(number, "interrupted" if event.error else "finished")
        elif isinstance(event, (RungDecided, FinalistsChosen)):
            for number in sorted({*event.candidates} - {*event.kept}):
                self._close(number, "stopped", event.recalled)
        elif isinstance(event, TrialEnded):
            self._close(event.trial, "stopped", event.recalled)
        elif isinstance(event, TrialFailed):
            self._close(event.trial, "failed", event.recalled)

    def _take_in(self, event: EpochEnded) -> None:
        trial, stage = self._trials.setdefault(event.trial, Logged(event.trial)), STAGES[event.stage]
        metrics = {name: math.nan if value is None else float(value) for name, value in event.metrics.items()}
        trial.epochs[stage] = event.epoch
        trial.metrics |= {f"{stage}/{name}": value for name, value in metrics.items()}
        self._closed.discard(event.trial)
        if event.recalled and event.epoch <= self.logged(event.trial, stage):
            return
        if event.trial not in self._open:
            self._open.add(event.trial)
            self.open(trial)
        self.log(trial, stage, event.epoch, metrics, event.seconds)

    def _close(self, number: int, status: str, recalled: bool = False) -> None:
        """Also what an earlier process left open; what it is recalled to have closed is closed."""
        trial = self._trials.get(number)
        if trial is None or not trial.epochs or number in self._closed:
            return
        self._closed.add(number)
        if number not in self._open:
            if recalled:
                return
            self.open(trial)
        self._open.discard(number)
        self.close(trial, status)


def needed(module: str, logger: str, extra: str) -> Any:
    """A module that a logger needs; ImportError, which says what to install, if it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        told = f"{logger} needs {module.partition('.')[0]}, which is not there: pip install 'hydro-rasda[{extra}]'"
        raise ImportError(told) from error


def plain(value: Any) -> bool | int | float | str:
    """A value of a configuration as every logger can store it."""
    return value if isinstance(value, (bool, int, float, str)) else getattr(value, "__name__", None) or str(value)
