"""Hyperparameter tuning for PyTorch with muP surrogates, fused trials and elastic full-size training."""

from .backends.cluster import RASDAScheduler
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
