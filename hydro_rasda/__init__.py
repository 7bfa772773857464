"""Hyperparameter tuning for PyTorch with muP surrogates, fused trials and elastic full-size training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydro_rasda.lazy_exports import lazy_exports
from hydro_rasda.package_conflicts import refuse_other_packages

if TYPE_CHECKING:
    from hydro_rasda.backends.local import LocalBackend
    from hydro_rasda.backends.ray.backend import RayBackend
    from hydro_rasda.backends.ray.elastic import elastic
    from hydro_rasda.backends.ray.report_journal import JournalEntry, read_journal
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
    from hydro_rasda.results.load import load
    from hydro_rasda.results.records import Cost, TrialRecord
    from hydro_rasda.results.result import AllTrialsFailed, TuneResult
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
    from hydro_rasda.run.spec import RunExists
    from hydro_rasda.schedulers.sweep_rule import Drop, GoOn, SweepRule, SweepState
    from hydro_rasda.training.large_batch import RescaledLR, lr_factor
    from hydro_rasda.training.worker import Worker
    from hydro_rasda.tuner import tune

__all__ = [
    "AllTrialsFailed",
    "Backend",
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
    "backends.ray.report_journal": ["JournalEntry", "read_journal"],
    "backends.ray.scheduler": ["RASDAScheduler"],
    "config": ["RASDAConfig"],
    "contracts": ["Backend", "Callback", "Event"],
    "domains": ["choice", "grid_search", "loguniform", "qloguniform", "quniform", "randint", "sample_from", "uniform"],
    "run.events": [
        *("CheckpointSaved", "EpochEnded", "EpochsTrained", "FinalistsChosen", "MessageSaid", "RunBegan", "RunEnded"),
        *("RungDecided", "StageBegan", "StageEnded", "TrialConfigured", "TrialEnded", "TrialFailed"),
    ],
    "results.load": ["load"],
    "results.records": ["Cost", "TrialRecord"],
    "results.result": ["AllTrialsFailed", "TuneResult"],
    "run.spec": ["RunExists"],
    "schedulers.sweep_rule": ["Drop", "GoOn", "SweepRule", "SweepState"],
    "training.large_batch": ["RescaledLR", "lr_factor"],
    "training.worker": ["Worker"],
    "tuner": ["tune"],
}

refuse_other_packages("fusion", "surrogate")

__getattr__ = lazy_exports(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
