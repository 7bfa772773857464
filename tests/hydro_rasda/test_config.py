from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hydro_rasda import RaceConfig, SweepConfig
from hydro_rasda.config import TuneConfig, recorded

Part = type[TuneConfig] | type[SweepConfig] | type[RaceConfig]
PREFIX: dict[Part, str] = {TuneConfig: "", SweepConfig: r"sweep\.", RaceConfig: r"race\."}


@pytest.mark.parametrize(
    ("part", "argument", "value"),
    [
        (TuneConfig, "metric", ""),
        (TuneConfig, "metric", None),
        (TuneConfig, "mode", "least"),
        (TuneConfig, "mode", ["min"]),
        (TuneConfig, "num_samples", 0),
        (TuneConfig, "num_samples", 2.0),
        (TuneConfig, "num_samples", True),
        (TuneConfig, "max_t", 0),
        (TuneConfig, "sweep", {"grace_period": 1}),
        (TuneConfig, "race", {"grace_period": 1}),
        (TuneConfig, "graph", "always"),
        (TuneConfig, "graph", 1),
        (TuneConfig, "loader_workers", -1),
        (TuneConfig, "loader_workers", True),
        (TuneConfig, "time_budget_s", 0),
        (TuneConfig, "time_budget_s", math.inf),
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
        (RaceConfig, "train", "loop"),
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
        sweep=SweepConfig(grace_period=1, reduction_factor=2, surrogate=1, fusion=1),
        race=RaceConfig(top_k=1),
        seed=0,
    )
    TuneConfig(time_budget_s=1e-3, race=RaceConfig(checkpoint_every=1, grace_period=27))


def test_full_size_stage_compares_first_at_half() -> None:
    assert TuneConfig(max_t=27).first_look == 14
    assert TuneConfig(max_t=3).first_look == 2
    assert TuneConfig(max_t=27, race=RaceConfig(grace_period=9)).first_look == 9


def test_limits_on_cost_do_not_make_another_run() -> None:
    asked = TuneConfig().determining()
    race = RaceConfig(checkpoint_every=2, train=print)
    assert TuneConfig(time_budget_s=5.0, race=race, loader_workers=1, stop_at=0.5, graph=False).determining() == asked
    assert TuneConfig(race=RaceConfig(scaling_factor=3)).determining() != asked
    assert json.loads(json.dumps(asked)) == asked


def test_settings_have_the_names_of_earlier_runs() -> None:
    """So that these go on: `run.json` is compared name by name."""
    assert TuneConfig().determining() == {
        **{"metric": "val_loss", "mode": "min", "num_samples": 64, "max_t": 27, "grace_period": 1},
        **{"reduction_factor": 3, "top_k": 4, "full_trainings": 3.0, "surrogate": 0.125, "fusion": "auto"},
        **{"check_transfer": False, "keep": "best", "patience": None, "ema": 0.03, "precision": "fp32", "seed": 0},
        "rasda": {
            **{"grace_period": None, "reduction_factor": 2, "scaling_factor": 2, "workers": 1, "max_workers": None},
            **{"lr_rule": "auto", "grow": "due", "least_efficiency": 0.5, "batch_over_noise": 1.0, "strategy": "ddp"},
        },
    }


def test_settings_are_read_from_what_was_kept() -> None:
    race = RaceConfig(top_k=2, keep="last", grace_period=3, workers=2)
    asked = TuneConfig(num_samples=5, sweep=SweepConfig(surrogate=0.5, fusion=2), race=race)
    own, sweep, race_kept = recorded({**asked.determining(), "space": {}, "wait": 0.5})
    assert TuneConfig(**own, sweep=SweepConfig(**sweep), race=RaceConfig(**race_kept)) == asked


def test_workers_are_sent_none_of_the_users_objects() -> None:
    race = RaceConfig(top_k=2, train=print)
    asked = TuneConfig(sweep=SweepConfig(fusion=2, first=[{"lr": 0.1}]), race=race)
    assert asked.plain() == TuneConfig(sweep=SweepConfig(fusion=2), race=RaceConfig(top_k=2))
