"""What happens in a run, as plain values: what a callback is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Stage = Literal["surrogate", "target"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run; `dataclasses.asdict` gives its values.

    Attributes:
        seconds: Wall time of the run when it happened, interrupted sessions included.
        recalled: Whether it happened in an earlier process of the run. A run that goes on begins by telling what its
            journal has of trials and epochs, and tells decisions again as it comes by them: a logger that wrote them
            down then skips what is recalled.
    """

    seconds: float
    recalled: bool = False


@dataclass(frozen=True, kw_only=True)
class RunBegan(Event):
    """A run begins, or goes on in another process.

    Attributes:
        path: Its folder.
        metric: What trials are compared by.
        mode: "min" or "max".
        settings: The arguments of `tune` that decide what it finds, by name.
    """

    path: Path
    metric: str
    mode: Literal["min", "max"]
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """A run is over, or `tune` raises.

    Attributes:
        best_trial: Number of the best trial; None where `tune` raises, like the next two.
        best_config: Its configuration, likewise without secrets.
        best_metric: Its metric.
        error: What `tune` raises: "KeyboardInterrupt: ...", say; None where the run is over.
    """

    best_trial: int | None = None
    best_config: Mapping[str, Any] | None = None
    best_metric: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class StageBegan(Event):
    """A part of the run begins: the surrogates, the full size to its next milestone, the check of the transfer.

    Attributes:
        epochs: How many it trains, over all of its trials.
    """

    title: str
    epochs: int


@dataclass(frozen=True, kw_only=True)
class StageEnded(Event):
    """The part of the run that began last ends."""


@dataclass(frozen=True, kw_only=True)
class EpochsTrained(Event):
    """Epochs were trained, on any device: told at once, for a progress bar.

    Their metrics are told as `EpochEnded`, once the work that they belong to is complete and in the journal.

    Attributes:
        epochs: How many, over the trials that train together.
        note: The best metric among those trials, in words; may be empty.
        seconds_left: How long the run still takes, estimated from planned epochs and measured times; None before that
            is known.
    """

    epochs: int
    note: str = ""
    seconds_left: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrialConfigured(Event):
    """A trial has its configuration, or another than before (PBT).

    Attributes:
        config: Its hyperparameters; of secrets, such as `hf_token`, "(hidden)".
    """

    trial: int
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    """A trial's metrics after an epoch, as the journal has them. An epoch that is trained again is told again.

    Attributes:
        stage: "surrogate" or "target", the full-size model.
        epoch: Epochs that it has trained, from 1.
        metrics: "train_*" and "val_*"; None where not finite. On Ray also the workers at work.
    """

    stage: Stage
    trial: int
    epoch: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RungDecided(Event):
    """Trials that came to one milestone were compared.

    Attributes:
        stage: "surrogate" or "target".
        epoch: The milestone.
        kept: Those that go on, best first.
    """

    stage: Stage
    epoch: int
    candidates: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FinalistsChosen(Event):
    """The sweep came to its end. Not told where the time budget ended it before.

    Attributes:
        kept: Those that train at full size, best first.
    """

    candidates: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TrialEnded(Event):
    """The training of a full-size trial has ended by itself, before its last epoch.

    Attributes:
        epoch: Epochs that it has trained.
    """

    trial: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class TrialFailed(Event):
    """A trial raised.

    Attributes:
        error: The traceback.
    """

    trial: int
    error: str


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint was written. It is removed once a later one takes its place.

    Attributes:
        stage: "surrogate" or "target".
        path: The file.
    """

    stage: Stage
    trials: tuple[int, ...]
    path: Path


@dataclass(frozen=True, kw_only=True)
class MessageSaid(Event):
    """Something that a user should read.

    Attributes:
        text: A line.
    """

    text: str
