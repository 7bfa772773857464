"""Ray's schedulers for the full-size stage, made by name from the settings of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search.sample import Categorical, Domain, Float, Integer

from hydro_rasda.backends.ray.scheduler import RASDAScheduler
from hydro_rasda.checks import require
from hydro_rasda.config import TuneConfig
from hydro_rasda.domains import to_ray
from hydro_rasda.schedulers.sweep_rule import CHANGEABLE

_TIME = "training_iteration"


def make_scheduler(
    scheduler: str | TrialScheduler, settings: TuneConfig, worker: Mapping[str, float], space: Mapping[str, Any]
) -> TrialScheduler:
    """A scheduler for full-size trials.

    Args:
        scheduler: "rasda", "asha", "hyperband", "median" or "pbt"; or a scheduler of the user's.
        settings: Of the run: its `max_t`, its full-size grace period, and its `rasda`.
        worker: Resources of one worker.
        space: The search space, within which PBT changes what the optimizer reads.

    Raises:
        ValueError: where it is neither a scheduler nor one's name, or PBT could change nothing.
    """
    check_scheduler(scheduler)
    if isinstance(scheduler, TrialScheduler):
        return scheduler
    return _BY_NAME[scheduler](settings, worker, space)


def check_scheduler(scheduler: object) -> None:
    """Refuse what is neither one of Ray Tune's schedulers nor the name of one.

    Raises:
        ValueError: where it is something else.
    """
    known = isinstance(scheduler, TrialScheduler) or (isinstance(scheduler, str) and scheduler in _BY_NAME)
    require(known, "scheduler", scheduler, _RULE)


def _rasda(settings: TuneConfig, worker: Mapping[str, float], space: Mapping[str, Any]) -> TrialScheduler:
    rasda = settings.rasda
    return RASDAScheduler(
        max_t=settings.max_t,
        grace_period=settings.full_grace_period,
        reduction_factor=rasda.reduction_factor,
        scaling_factor=rasda.scaling_factor,
        workers=rasda.workers,
        resources_per_worker=worker,
        max_workers=rasda.max_workers,
        time_attr=_TIME,
        wait=rasda.wait,
        grow=rasda.grow,
        least_efficiency=rasda.least_efficiency,
        batch_over_noise=rasda.batch_over_noise,
    )


def _asha(settings: TuneConfig, worker: Mapping[str, float], space: Mapping[str, Any]) -> TrialScheduler:
    return AsyncHyperBandScheduler(
        time_attr=_TIME,
        max_t=settings.max_t,
        grace_period=settings.full_grace_period,
        reduction_factor=settings.rasda.reduction_factor,
    )


def _hyperband(settings: TuneConfig, worker: Mapping[str, float], space: Mapping[str, Any]) -> TrialScheduler:
    factor = settings.rasda.reduction_factor
    return _HyperBand(time_attr=_TIME, max_t=settings.max_t, reduction_factor=factor)


class _HyperBand(HyperBandScheduler):  # type: ignore[misc]
    """Ray's own leaves trials paused for ever where another of their bracket fails after its first halving."""

    def _process_bracket(self, tune_controller: Any, bracket: Any) -> str:
        action = super()._process_bracket(tune_controller, bracket)
        bracket.is_being_processed = False
        return str(action)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        super().on_trial_remove(tune_controller, trial)
        bracket, _ = self._trial_info[trial]
        if bracket.finished() and not bracket.is_being_processed:
            bracket.cleanup_full(tune_controller)


def _median(settings: TuneConfig, worker: Mapping[str, float], space: Mapping[str, Any]) -> TrialScheduler:
    return MedianStoppingRule(time_attr=_TIME, grace_period=settings.full_grace_period)


def _pbt(settings: TuneConfig, worker: Mapping[str, float], space: Mapping[str, Any]) -> TrialScheduler:
    mutations = {key: mutation for key in CHANGEABLE if (mutation := _mutation(to_ray(space.get(key)))) is not None}
    require(bool(mutations), "scheduler", "pbt", f"another one, for `space` searches none of {CHANGEABLE}")
    return PopulationBasedTraining(
        time_attr=_TIME,
        perturbation_interval=settings.full_grace_period,
        hyperparam_mutations={"config": mutations},
        custom_explore_fn=_within(mutations),
        log_config=False,
    )


def checkpoint_interval(scheduler: TrialScheduler, settings: TuneConfig) -> int | None:
    """Epochs between checkpoints, so that a trial finds one wherever this scheduler pauses or copies it.

    None for RASDA, which says itself at which milestones it does.
    """
    if isinstance(scheduler, RASDAScheduler):
        return settings.checkpoint_every
    regular = isinstance(scheduler, (AsyncHyperBandScheduler, MedianStoppingRule, PopulationBasedTraining))
    return min(settings.checkpoint_every or settings.max_t, settings.full_grace_period if regular else 1)


_Maker = Callable[[TuneConfig, Mapping[str, float], Mapping[str, Any]], TrialScheduler]

_BY_NAME: dict[str, _Maker] = {
    "rasda": _rasda,
    "asha": _asha,
    "hyperband": _hyperband,
    "median": _median,
    "pbt": _pbt,
}

_RULE = f"one of {tuple(_BY_NAME)}, or a TrialScheduler of Ray's"


def _mutation(value: Any) -> Domain | list[Any] | None:
    """What PBT draws from; None for what it cannot: constants and functions."""
    if isinstance(value, Categorical):
        return list(value.categories)
    if isinstance(value, Mapping) and set(value) == {"grid_search"}:
        return list(value["grid_search"])
    return value if isinstance(value, (Float, Integer)) else None


def _within(mutations: Mapping[str, Domain | list[Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Keeps within its domain what PBT multiplied by 1.2: a momentum of 1.1 trains nothing."""
    bounds = {
        key: (
            -math.inf if domain.lower is None else domain.lower,
            math.inf if domain.upper is None else _last(domain),
        )
        for key, domain in mutations.items()
        if isinstance(domain, (Float, Integer))
    }

    def explored(trial: dict[str, Any]) -> dict[str, Any]:
        config = trial["config"]
        clipped = {key: min(max(config[key], low), high) for key, (low, high) in bounds.items()}
        return {**trial, "config": {**config, **clipped}}

    return explored


def _last(domain: Float | Integer) -> float:
    """The largest value of a domain whose upper bound is excluded."""
    return domain.upper - 1 if isinstance(domain, Integer) else math.nextafter(domain.upper, -math.inf)
