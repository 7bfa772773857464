"""Widths are measured once, remembered, and never fuse where fusing loses."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from hydro_rasda import TuneResult, planning
from hydro_rasda.grouping import Widths
from hydro_rasda.planning import cache_file, planned_widths, widths_from
from hydro_rasda.problem import Problem, Trial
from tests.hydro_rasda.models import Config, mlp

Pair = tuple[Tensor, Tensor]


@pytest.fixture
def problem(problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problem:
    """On a machine where nothing was measured yet."""
    monkeypatch.setenv("HYDRO_RASDA_CACHE", str(tmp_path / "cache"))
    return problem


TRIAL = Trial(0, {"lr": 0.1, "batch_size": 32})


def test_measured_once_and_remembered(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned_widths(problem, {"kind": (TRIAL, 8)})["kind"]
    (measured,) = json.loads(cache_file().read_text()).values()
    assert first == widths_from({int(k): rate for k, rate in measured["throughput"].items()}, measured["width"])
    assert 1 <= first.most <= 8

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(planning, "plan_fusion", refuse)
    assert planned_widths(problem, {"kind": (TRIAL, 8)}) == {"kind": first}
    with pytest.raises(AssertionError, match="measured again"):
        planned_widths(problem, {"another kind": (TRIAL, 8)})


def test_a_single_trial_is_not_measured(problem: Problem) -> None:
    assert planned_widths(problem, {"kind": (TRIAL, 1)}) == {"kind": Widths(1)}
    assert not cache_file().exists()


def test_a_torn_cache_is_measured_anew(problem: Problem) -> None:
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text('{"half a')
    planned_widths(problem, {"kind": (TRIAL, 2)})
    assert len(json.loads(cache_file().read_text())) == 1


def test_widths_where_fusing_loses() -> None:
    losing, paying = widths_from({1: 100.0, 2: 90.0, 4: 95.0}, most=1), widths_from({1: 100.0, 2: 130.0}, most=2)
    assert (losing.most, losing.least, losing.rate) == (1, 2, 100.0)
    assert (paying.most, paying.least, paying.rate) == (2, 2, 130.0)


def test_kinds_are_measured_beside_each_other(problem: Problem) -> None:
    """Each on a core, for the part of the trials that a core trains; one that cannot be survived is not fused."""

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        if "deadly" in config and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return mlp(config, width_ratio)

    here = os.getpid()
    deadly = Trial(1, {"lr": 0.1, "batch_size": 64, "deadly": True})
    asked = replace(problem, model_fn=model_fn)
    widths = planned_widths(asked, {"kind": (TRIAL, 9), "deadly": (deadly, 9)}, cores=2)
    assert max(widths["kind"].throughput) <= 5
    assert widths["deadly"] == Widths(1)
    assert len(json.loads(cache_file().read_text())) == 1


def test_auto_finds_what_a_fixed_width_finds(quick: Callable[..., TuneResult]) -> None:
    auto, fixed = quick(fusion="auto", name="auto"), quick(fusion=3, name="fixed")
    assert auto.best_config == fixed.best_config
    for one, other in zip(auto.trials, fixed.trials, strict=True):
        assert one.surrogate_metric == pytest.approx(other.surrogate_metric, rel=1e-3)
