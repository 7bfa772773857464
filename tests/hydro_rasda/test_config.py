from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from hydro_rasda import RASDAConfig
from hydro_rasda.config import TuneConfig


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("metric", ""),
        ("metric", None),
        ("mode", "least"),
        ("mode", ["min"]),
        ("num_samples", 0),
        ("num_samples", 2.0),
        ("num_samples", True),
        ("max_t", 0),
        ("grace_period", 0),
        ("grace_period", 28),
        ("top_k", 0),
        ("reduction_factor", 1),
        ("reduction_factor", 2.5),
        ("surrogate", 0),
        ("surrogate", 1.5),
        ("surrogate", -0.5),
        ("surrogate", math.nan),
        ("surrogate", "1/8"),
        ("fusion", 0),
        ("fusion", "all"),
        ("fusion", True),
        ("rasda", {"grace_period": 1}),
        ("rasda", RASDAConfig(grace_period=28)),
        ("checkpoint_every", 0),
        ("graph", "always"),
        ("graph", 1),
        ("loader_workers", -1),
        ("loader_workers", True),
        ("time_budget_s", 0),
        ("time_budget_s", math.inf),
        ("seed", -1),
        ("seed", 1.0),
        ("seed", None),
    ],
)
def test_each_argument_has_a_rule(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^`(rasda\.)?{argument}(\.grace_period)?` is .*, but must be "):
        TuneConfig(**{argument: value})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("grace_period", 0),
        ("grace_period", 0.5),
        ("reduction_factor", 1),
        ("scaling_factor", 1),
        ("scaling_factor", 2.0),
        ("workers", 0),
        ("max_workers", 0),
        ("lr_rule", "cubic"),
        ("wait", -0.1),
        ("wait", math.inf),
        ("wait", True),
        ("grow", "fast"),
        ("least_efficiency", 1.0),
        ("least_efficiency", -0.1),
        ("batch_over_noise", 0),
        ("batch_over_noise", math.nan),
    ],
)
def test_rasda_has_rules_too(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^`rasda\.{argument}` is .*, but must be "):
        RASDAConfig(**{argument: value})


def test_bounds_are_allowed() -> None:
    TuneConfig(num_samples=1, max_t=1, grace_period=1, reduction_factor=2, top_k=1, surrogate=1, fusion=1, seed=0)
    TuneConfig(time_budget_s=1e-3, checkpoint_every=1, rasda=RASDAConfig(grace_period=27))


def test_full_size_stage_compares_first_at_half() -> None:
    assert TuneConfig(max_t=27).first_look == 14
    assert TuneConfig(max_t=3).first_look == 2
    assert TuneConfig(max_t=27, rasda=RASDAConfig(grace_period=9)).first_look == 9


def test_limits_on_cost_do_not_make_another_run() -> None:
    asked = TuneConfig().determining()
    other = TuneConfig(time_budget_s=5.0, checkpoint_every=2, loader_workers=1, stop_at=0.5, graph=False)
    assert other.determining() == asked
    assert set(asked) == {f.name for f in dataclasses.fields(TuneConfig)} - {
        "time_budget_s",
        "checkpoint_every",
        "graph",
        "loader_workers",
        "stop_at",
    }
    assert TuneConfig(rasda=RASDAConfig(scaling_factor=3)).determining() != asked
    assert json.loads(json.dumps(asked)) == asked
