"""Parts of a call of `tune` that other libraries' trainings decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from fusion.warn import warn
from hydro_rasda.checks import check_is
from hydro_rasda.config import RaceConfig, SweepConfig
from surrogate import shrink


def check_parts(sweep: object, race: object) -> None:
    """Refuse what `tune` does not take as `sweep` and `race`."""
    check_is("sweep", sweep, SweepConfig)
    check_is("race", race, RaceConfig)


def unaveraged(race: RaceConfig) -> RaceConfig:
    """Average no weights, as other libraries' loops average none, unless `ema` is another than its default."""
    return replace(race, ema=0.0) if race.ema == RaceConfig.ema else race


def narrow_or_full(sweep: SweepConfig, model: nn.Module, example: Callable[[], Any]) -> SweepConfig:
    """The sweep that was asked for; one at full width, which is said, if the model cannot be made so narrow.

    Args:
        example: Gives what the model is called with, as `shrink` takes it.
    """
    width = sweep.surrogate
    if width == 1:
        return sweep
    try:
        shrink(model, width, example())
    except Exception as error:
        told = (str(error) or type(error).__name__).splitlines()[0]
        warn(f"the model is swept at its full width (`sweep.surrogate=1`), not at {width:g}: {told}")
        return replace(sweep, surrogate=1)
    return sweep
