"""The events of a run, as plain values, and the callbacks that receive them while the run is in progress."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from hydro_rasda.common.argument_checks import check_function, require
from hydro_rasda.common.heat_names import HeatName, RunPart


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run; `dataclasses.asdict` gives its values.

    Attributes:
        seconds: Wall time of the run when it happened, interrupted sessions included.
        recalled: True if the event happened in an earlier process of the run. A resumed run first repeats the events of
            trials and epochs in its journal. It repeats an earlier decision when it comes to that decision. A logger
            that already has these events skips the recalled ones.
    """

    seconds: float
    recalled: bool = False


@dataclass(frozen=True, kw_only=True)
class RunBegan(Event):
    """A run begins, or another process resumes it.

    Attributes:
        path: The run's folder.
        metric: The metric by which trials are compared.
        settings: The arguments of `tune` that determine its result, by name.
    """

    path: Path
    metric: str
    mode: Literal["min", "max"]
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """A run is over, or `tune` raises.

    Attributes:
        best_trial: Number of the best trial. If `tune` raises, it is None, and so are `best_config` and `best_metric`.
        best_config: The configuration of the best trial, without secrets.
        error: The error that `tune` raises, such as "KeyboardInterrupt: ..."; None if the run is over.
    """

    best_trial: int | None = None
    best_config: Mapping[str, Any] | None = None
    best_metric: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class HeatBegan(Event):
    """A heat or the transfer check begins. The race sends this event again after each milestone.

    Attributes:
        epochs: Number of epochs that this part trains, summed over its trials.
    """

    heat: RunPart
    epochs: int


@dataclass(frozen=True, kw_only=True)
class HeatEnded(Event):
    """The heat or transfer check that began last is over."""


@dataclass(frozen=True, kw_only=True)
class EpochsTrained(Event):
    """Epochs were trained, on any device. This event is sent at once, for a progress bar.

    The metrics follow as `EpochEnded`: for full-size models at once, for surrogates once their unit of work is
    complete.

    Attributes:
        epochs: Number of epochs, summed over the trials that train together.
        note: The best metric among these trials, in words; may be empty.
        seconds_left: Estimate of the seconds that the run still takes, from planned epochs and measured times; None
            until it is known.
    """

    epochs: int
    note: str = ""
    seconds_left: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrialConfigured(Event):
    """A trial got its first configuration, or a new one (population based training).

    Attributes:
        config: The trial's hyperparameters; secrets are shown as "(hidden)".
    """

    trial: int
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    """A trial's metrics after an epoch, as recorded in the journal.

    The race sends this event after each epoch. The other heats send it when a milestone is reached. If an epoch is
    trained again, the event is sent again. The race leaves it out if the metrics are the same as before.

    Attributes:
        heat: "sweep"; "middle", on a wider surrogate (`full_trainings` below 3); or "race", on the full-size model.
        epoch: Number of epochs that the trial has trained, from 1.
        metrics: "train_*" and "val_*"; None if not finite. On Ray, also the number of workers.
    """

    heat: HeatName
    trial: int
    epoch: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RungDecided(Event):
    """The trials at a milestone were compared.

    Attributes:
        epoch: The milestone.
        kept: The trials that go on, best first.
    """

    heat: HeatName
    epoch: int
    candidates: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FinalistsChosen(Event):
    """The sweep chose its finalists. The event is not sent if the time budget ended the sweep.

    Attributes:
        kept: The trials that go on, best first: at full size, or to the middle heat if there is one.
    """

    candidates: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TrialEnded(Event):
    """The training of a full-size trial ended by itself before its last epoch.

    Attributes:
        epoch: Number of epochs that the trial has trained.
    """

    trial: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class TrialFailed(Event):
    """A trial raised an exception.

    Attributes:
        error: The traceback of the exception.
    """

    trial: int
    error: str


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint was written. It is removed once a later one replaces it."""

    heat: HeatName
    trials: tuple[int, ...]
    path: Path


@dataclass(frozen=True, kw_only=True)
class MessageSaid(Event):
    """Something that a user should read."""

    text: str


class Callback(Protocol):
    """An object that receives each event of a run, one after another, in the process that called `tune`.

    The run waits until `on_event` returns. A callback that raises gets no more events, and the run continues.
    """

    def on_event(self, event: Event) -> None:
        """Receive an event that has happened. The journal already has the trials and epochs that it reports.

        Only `EpochsTrained` and `CheckpointSaved` come before the journal has their epochs.
        """
        ...


Listener = Callback | Callable[[Event], None]
"""An item of `tune(callbacks=...)`: a callback, or a function that takes an event."""


def check_callbacks(callbacks: Sequence[Listener]) -> None:
    """Raise ValueError if an item of `tune(callbacks=...)` is not a `Listener`."""
    rule = "a list of functions of an event, or of objects with a method `on_event`"
    require(isinstance(callbacks, (list, tuple)), "callbacks", callbacks, rule)
    for i, callback in enumerate(callbacks):
        rule = "a function of an event, or an object (no class) with a method `on_event`"
        listens = callback if isinstance(callback, type) else getattr(callback, "on_event", callback)
        check_function(f"callbacks[{i}]", listens, 1, rule=rule)
        awaited = inspect.iscoroutinefunction(listens)
        require(not awaited, f"callbacks[{i}]", callback, "without `async`, because nothing awaits what it returns")


class Callbacks:
    """The callbacks of a run. Each event goes to all of them, in the order in which they were given."""

    def __init__(self, callbacks: Sequence[Listener] = ()) -> None:
        self._callbacks: list[Any] = list(callbacks)
        self._exit: SystemExit | None = None

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def notify(self, event: Event) -> None:
        """Give an event to all callbacks. If one raises, warn of it and give it no more events.

        If a callback raises SystemExit, raise it again at the next event. Within training, the first one may be taken
        for an error of the trial.
        """
        if self._exit is not None and not isinstance(event, RunEnded):
            raise self._exit
        for callback in list(self._callbacks):
            try:
                getattr(callback, "on_event", callback)(event)
            except SystemExit as end:
                self._exit = end
                raise
            except Exception:
                self._callbacks = [other for other in self._callbacks if other is not callback]
                warnings.warn(
                    f"the callback {callback!r} raised at {type(event).__name__}, and is left out from now on; "
                    f"the run goes on:\n{traceback.format_exc()}",
                    stacklevel=2,
                )
