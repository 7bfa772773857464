from __future__ import annotations

import math
from typing import Any

import pytest

from hydro_rasda import RaceConfig, SweepConfig
from hydro_rasda.schedulers import MedianStopping, NoStopping, PopulationBasedTraining, Range, SweepRule
from hydro_rasda.settings.config import MOST_EPOCHS, MOST_TRIALS, TuneConfig

Part = type[TuneConfig] | type[SweepConfig] | type[RaceConfig]
PREFIX: dict[Part, str] = {TuneConfig: "", SweepConfig: r"sweep\.", RaceConfig: r"race\."}


@pytest.mark.parametrize(
    ("part", "argument", "value"),
    [
        (TuneConfig, "metric", ""),
        (TuneConfig, "metric", None),
        (TuneConfig, "metric", "heat"),
        (TuneConfig, "mode", "least"),
        (TuneConfig, "mode", ["min"]),
        (TuneConfig, "num_samples", 0),
        (TuneConfig, "num_samples", 2.0),
        (TuneConfig, "num_samples", True),
        (TuneConfig, "num_samples", MOST_TRIALS + 1),
        (TuneConfig, "max_t", 0),
        (TuneConfig, "max_t", MOST_EPOCHS + 1),
        (TuneConfig, "full_trainings", -1),
        (TuneConfig, "full_trainings", math.nan),
        pytest.param(TuneConfig, "full_trainings", 10**400, id="too many trainings"),
        (TuneConfig, "stop_at", math.nan),
        (TuneConfig, "precision", "fp64"),
        (TuneConfig, "sweep", {"grace_period": 1}),
        (TuneConfig, "race", {"grace_period": 1}),
        (TuneConfig, "graph", "always"),
        (TuneConfig, "graph", 1),
        (TuneConfig, "loader_workers", -1),
        (TuneConfig, "loader_workers", True),
        (TuneConfig, "time_budget_s", 0),
        (TuneConfig, "time_budget_s", math.inf),
        pytest.param(TuneConfig, "time_budget_s", 10**400, id="too many seconds"),
        (TuneConfig, "seed", -1),
        (TuneConfig, "seed", 1.0),
        (TuneConfig, "seed", None),
        (SweepConfig, "grace_period", 0),
        (SweepConfig, "reduction_factor", 1),
        (SweepConfig, "reduction_factor", 2.5),
        (SweepConfig, "surrogate", 0),
        (SweepConfig, "surrogate", 1.5),
        (SweepConfig, "surrogate", -0.5),
        (SweepConfig, "surrogate", math.nan),
        (SweepConfig, "surrogate", "1/8"),
        (SweepConfig, "depth", 0),
        (SweepConfig, "repeats", 0),
        (SweepConfig, "searcher", "grid"),
        (SweepConfig, "rule", "halve"),
        (SweepConfig, "rule", None),
        (SweepConfig, "first", {"lr": 0.1}),
        (SweepConfig, "fusion", 0),
        (SweepConfig, "fusion", "all"),
        (SweepConfig, "fusion", True),
        (SweepConfig, "check_transfer", 1),
        (RaceConfig, "top_k", 0),
        (RaceConfig, "keep", "first"),
        (RaceConfig, "patience", 0),
        (RaceConfig, "ema", 1.0),
        (RaceConfig, "checkpoint_every", 0),
        (RaceConfig, "refit", 1),
        (RaceConfig, "grace_period", 0),
        (RaceConfig, "grace_period", 0.5),
        (RaceConfig, "reduction_factor", 1),
        (RaceConfig, "scaling_factor", 1),
        (RaceConfig, "scaling_factor", 2.0),
        (RaceConfig, "workers", 0),
        (RaceConfig, "max_workers", 0),
        (RaceConfig, "lr_rule", "cubic"),
        (RaceConfig, "grow", "fast"),
        (RaceConfig, "least_efficiency", 1.0),
        (RaceConfig, "least_efficiency", -0.1),
        (RaceConfig, "batch_over_noise", 0),
        (RaceConfig, "batch_over_noise", math.nan),
        (RaceConfig, "strategy", "zero"),
    ],
)
def test_each_argument_has_a_rule(part: Part, argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^`{PREFIX[part]}{argument}` is .*, but must be "):
        part(**{argument: value})


@pytest.mark.parametrize(
    "rule", [NoStopping(28), MedianStopping(28), PopulationBasedTraining({"lr": Range(0.0, 1.0)}, 28)]
)
def test_a_sweep_ends_within_a_training(rule: SweepRule) -> None:
    with pytest.raises(ValueError, match=r"`sweep\.rule` is .*, but must be one whose `last` is <= max_t \(27\)"):
        TuneConfig(sweep=SweepConfig(rule=rule))
    TuneConfig(sweep=SweepConfig(rule=rule), max_t=28)


@pytest.mark.parametrize("settings", [{"sweep": SweepConfig(grace_period=28)}, {"race": RaceConfig(grace_period=28)}])
def test_no_rung_lies_beyond_a_training(settings: dict[str, Any]) -> None:
    (part,) = settings
    with pytest.raises(ValueError, match=rf"^`{part}.grace_period` is 28, but must be <= max_t \(27\)"):
        TuneConfig(**settings)


def test_a_part_shows_what_differs_from_its_defaults() -> None:
    assert repr(SweepConfig()) == "SweepConfig()"
    assert repr(SweepConfig(surrogate=1 / 8, fusion=4)) == "SweepConfig(fusion=4)"
    shown = repr(RaceConfig(top_k=2, keep="last"))
    assert shown == "RaceConfig(top_k=2, keep='last')"
    assert eval(shown) == RaceConfig(top_k=2, keep="last")


def test_bounds_are_allowed() -> None:
    TuneConfig(
        num_samples=1,
        max_t=1,
        full_trainings=0,
        sweep=SweepConfig(grace_period=1, reduction_factor=2, surrogate=1, depth=1, fusion=1, repeats=1),
        race=RaceConfig(top_k=1, ema=0, reduction_factor=2, scaling_factor=2, workers=1, least_efficiency=0),
        seed=0,
    )
    TuneConfig(time_budget_s=1e-3, race=RaceConfig(checkpoint_every=1, grace_period=27), seed=2**63 - 1)


def test_full_size_stage_compares_first_at_half() -> None:
    assert TuneConfig(max_t=27).first_look == 14
    assert TuneConfig(max_t=3).first_look == 2
    assert TuneConfig(max_t=27, race=RaceConfig(grace_period=9)).first_look == 9


def test_workers_are_sent_none_of_the_users_objects() -> None:
    race = RaceConfig(top_k=2)
    asked = TuneConfig(sweep=SweepConfig(fusion=2, first=[{"lr": 0.1}]), race=race)
    assert asked.plain() == TuneConfig(sweep=SweepConfig(fusion=2), race=race)
