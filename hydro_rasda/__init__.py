"""Hyperparameter tuning for PyTorch with muP surrogates, fused trials and elastic full-size training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends.ray_scheduler import RASDAScheduler
    from .config import RASDAConfig
    from .result import Cost, TrialRecord, TuneResult
    from .space import choice, grid_search, loguniform, qloguniform, quniform, randint, sample_from, uniform
    from .store import RunExists
    from .sweep import AllTrialsFailed
    from .tuner import tune

__all__ = [
    "AllTrialsFailed",
    "Cost",
    "RASDAConfig",
    "RASDAScheduler",
    "RunExists",
    "TrialRecord",
    "TuneResult",
    "choice",
    "grid_search",
    "loguniform",
    "qloguniform",
    "quniform",
    "randint",
    "sample_from",
    "tune",
    "uniform",
]

_HOMES = {
    "AllTrialsFailed": "sweep",
    "Cost": "result",
    "RASDAConfig": "config",
    "RASDAScheduler": "backends.ray_scheduler",
    "RunExists": "store",
    "TrialRecord": "result",
    "TuneResult": "result",
    "tune": "tuner",
}


def __getattr__(name: str) -> Any:
    # Every worker process of a cluster imports this package: each pays for what it uses alone.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES.get(name, 'space')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
