"""Hyperparameter tuning for PyTorch with muP surrogates, fused trials and elastic full-size training."""

from typing import TYPE_CHECKING

from hydro_rasda.common.own_packages import refuse_other_packages

refuse_other_packages("fusion", "surrogate")

if TYPE_CHECKING:
    from hydro_rasda.backends.local import LocalBackend as LocalBackend
    from hydro_rasda.backends.ray.backend import RayBackend as RayBackend
    from hydro_rasda.backends.ray.elastic_trainable import elastic as elastic
    from hydro_rasda.backends.ray.scheduler import RASDAScheduler as RASDAScheduler
    from hydro_rasda.common.secret_masking import secret as secret
    from hydro_rasda.records.summary import AllTrialsFailed as AllTrialsFailed
    from hydro_rasda.results.result import TuneResult as TuneResult
    from hydro_rasda.results.result import load as load
    from hydro_rasda.run.resume_rules import RunExists as RunExists
    from hydro_rasda.settings.config import RaceConfig as RaceConfig
    from hydro_rasda.settings.config import SweepConfig as SweepConfig
    from hydro_rasda.space.domains import choice as choice
    from hydro_rasda.space.domains import grid_search as grid_search
    from hydro_rasda.space.domains import loguniform as loguniform
    from hydro_rasda.space.domains import qloguniform as qloguniform
    from hydro_rasda.space.domains import quniform as quniform
    from hydro_rasda.space.domains import randint as randint
    from hydro_rasda.space.domains import sample_from as sample_from
    from hydro_rasda.space.domains import uniform as uniform
    from hydro_rasda.training.worker import Worker as Worker
    from hydro_rasda.tuner import tune as tune
else:
    from fusion.lazy_names import lazy_exports  # after the check above: another package could have this name

    __all__, __getattr__, __dir__ = lazy_exports(__name__)
