"""The settings of a run, as its `run.json` keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from hydro_rasda.config import RaceConfig, TuneConfig
from hydro_rasda.objectives import bounds_of, split_metrics

_OWN = ("metric", "mode", "num_samples", "max_t", "full_trainings", "precision", "seed")
_OF_SWEEP = ("surrogate", "grace_period", "reduction_factor", "fusion", "check_transfer")
_OF_RACE = ("top_k", "keep", "patience", "ema")
_OF_RASDA = tuple(
    field.name for field in fields(RaceConfig) if field.name not in (*_OF_RACE, "checkpoint_every", "train", "refit")
)
"""Settings on which a run's decisions depend: `run.json` has the last as a dict, "rasda", and all others by name.

Those that earlier versions did not have are there only if they are not the default.
"""


def determining(settings: TuneConfig) -> dict[str, Any]:
    """The settings on which a run's decisions depend, as `run.json` has them.

    Not among them: what a run may cost, or must find, how often it is saved, and how its steps are run.
    """
    bounds = bounds_of(settings.sweep.constraints)
    several = {"metric": [name for name, _ in settings.objectives], "mode": [mode for _, mode in settings.objectives]}
    return {
        **{name: getattr(settings, name) for name in _OWN},
        **(several if settings.objectives else {}),
        **({"constraints": {name: [*pair] for name, pair in bounds.items()}} if bounds else {}),
        **({"folds": settings.folds} if settings.folds else {}),
        **{name: getattr(settings.sweep, name) for name in _OF_SWEEP},
        **({"repeats": settings.sweep.repeats} if settings.sweep.repeats > 1 else {}),
        **({"depth": settings.sweep.depth} if settings.sweep.depth < 1 else {}),
        **{name: getattr(settings.race, name) for name in _OF_RACE},
        **({} if settings.race.refit else {"refit": False}),
        "rasda": {name: getattr(settings.race, name) for name in _OF_RASDA},
    }


def recorded(asked: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Fields of `TuneConfig`, `SweepConfig` and `RaceConfig` from a `run.json`; earlier versions kept others, too."""
    own, sweep = _among((*_OWN, "folds"), asked), _among((*_OF_SWEEP, "constraints", "repeats", "depth"), asked)
    if isinstance(asked.get("metric"), list):
        own |= dict(zip(("metric", "mode", "objectives"), split_metrics(asked["metric"], asked["mode"]), strict=True))
    race = _among(_OF_RACE, asked) | _among(_OF_RASDA, asked.get("rasda", {}))
    race |= _among(("refit",), asked)
    return own, sweep, race


def _among(names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
