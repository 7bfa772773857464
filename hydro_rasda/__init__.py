"""Hyperparameter tuning for PyTorch with muP surrogates, fused trials and elastic full-size training."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hydro_rasda.package_conflicts import refuse_other_packages

if TYPE_CHECKING:
    from hydro_rasda.backends.local import LocalBackend
    from hydro_rasda.backends.ray.backend import RayBackend
    from hydro_rasda.backends.ray.elastic import elastic
    from hydro_rasda.backends.ray.journal import JournalEntry, read_journal
    from hydro_rasda.backends.ray.scheduler import RASDAScheduler
    from hydro_rasda.config import RASDAConfig
    from hydro_rasda.contracts import Backend, Callback, Event
    from hydro_rasda.domains import (
        choice,
        grid_search,
        loguniform,
        qloguniform,
        quniform,
        randint,
        sample_from,
        uniform,
    )
    from hydro_rasda.guests.backend import BubbleBackend
    from hydro_rasda.guests.host import bubbles
    from hydro_rasda.run.events import (
        CheckpointSaved,
        EpochEnded,
        EpochsTrained,
        FinalistsChosen,
        MessageSaid,
        RunBegan,
        RunEnded,
        RungDecided,
        StageBegan,
        StageEnded,
        TrialConfigured,
        TrialEnded,
        TrialFailed,
    )
    from hydro_rasda.run.load import load
    from hydro_rasda.run.records import Cost, TrialRecord
    from hydro_rasda.run.result import AllTrialsFailed, TuneResult
    from hydro_rasda.run.store import RunExists
    from hydro_rasda.schedulers.sweep_rule import Drop, GoOn, SweepRule, SweepState
    from hydro_rasda.training.large_batch import RescaledLR, lr_factor
    from hydro_rasda.training.worker import Worker
    from hydro_rasda.tuner import tune

__all__ = [
    "AllTrialsFailed",
    "Backend",
    "BubbleBackend",
    "Callback",
    "CheckpointSaved",
    "Cost",
    "Drop",
    "EpochEnded",
    "EpochsTrained",
    "Event",
    "FinalistsChosen",
    "GoOn",
    "JournalEntry",
    "LocalBackend",
    "MessageSaid",
    "RASDAConfig",
    "RASDAScheduler",
    "RayBackend",
    "RescaledLR",
    "RunBegan",
    "RunEnded",
    "RunExists",
    "RungDecided",
    "StageBegan",
    "StageEnded",
    "SweepRule",
    "SweepState",
    "TrialConfigured",
    "TrialEnded",
    "TrialFailed",
    "TrialRecord",
    "TuneResult",
    "Worker",
    "bubbles",
    "choice",
    "elastic",
    "grid_search",
    "load",
    "loguniform",
    "lr_factor",
    "qloguniform",
    "quniform",
    "randint",
    "read_journal",
    "sample_from",
    "tune",
    "uniform",
]

_HOMES = {
    "backends.local": ["LocalBackend"],
    "backends.ray.backend": ["RayBackend"],
    "backends.ray.elastic": ["elastic"],
    "backends.ray.journal": ["JournalEntry", "read_journal"],
    "backends.ray.scheduler": ["RASDAScheduler"],
    "config": ["RASDAConfig"],
    "contracts": ["Backend", "Callback", "Event"],
    "domains": ["choice", "grid_search", "loguniform", "qloguniform", "quniform", "randint", "sample_from", "uniform"],
    "guests.backend": ["BubbleBackend"],
    "guests.host": ["bubbles"],
    "run.events": [
        *("CheckpointSaved", "EpochEnded", "EpochsTrained", "FinalistsChosen", "MessageSaid", "RunBegan", "RunEnded"),
        *("RungDecided", "StageBegan", "StageEnded", "TrialConfigured", "TrialEnded", "TrialFailed"),
    ],
    "run.load": ["load"],
    "run.records": ["Cost", "TrialRecord"],
    "run.result": ["AllTrialsFailed", "TuneResult"],
    "run.store": ["RunExists"],
    "schedulers.sweep_rule": ["Drop", "GoOn", "SweepRule", "SweepState"],
    "training.large_batch": ["RescaledLR", "lr_factor"],
    "training.worker": ["Worker"],
    "tuner": ["tune"],
}

refuse_other_packages("fusion", "surrogate")


def __getattr__(name: str) -> Any:
    # Every worker process of a cluster imports this package: each pays for what it uses alone.
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_imported(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def _imported(module: str) -> ModuleType:
    """Import a module without passes of the garbage collector: they look at all that torch made, and imports leave no
    garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
