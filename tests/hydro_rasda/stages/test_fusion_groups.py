from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from hydro_rasda import SweepConfig
from hydro_rasda.objective import as_objective
from hydro_rasda.problem import Problem
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.stages.fusion_groups import ALIKE, find_kinds
from hydro_rasda.trial import Trial
from tests.hydro_rasda.models import Config, fixed_mlp, mlp, refuses_some


def trials(*configs: Config) -> list[Trial]:
    return [Trial(number, {"lr": 0.1, **config}) for number, config in enumerate(configs)]


@pytest.fixture
def without_width(problem: Problem) -> Problem:
    return replace(problem, model_fn=fixed_mlp, example_input=(torch.zeros(4, 64),))


@pytest.mark.parametrize("children", [0, 1, 2])
def test_trials_of_one_kind_share_structure_and_batch_size(problem: Problem, children: int) -> None:
    configs = [{"activation": a, "batch_size": b} for a, b in [("relu", 32), ("tanh", 32), ("relu", 64), ("relu", 32)]]
    kinds: dict[int, str] = find_kinds(problem, trials(*configs), children).value
    assert kinds[0] == kinds[3]
    assert len(set(kinds.values())) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="processes that have computed are forked on Linux alone")
def test_kinds_are_in_the_order_of_the_trials_whichever_child_is_done_first(problem: Problem, tmp_path: Path) -> None:
    done = tmp_path / "done"

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        if config["part"] == "last":
            done.write_text(str(os.getpid()))
        while config["part"] == "first" and not (done.exists() and not psutil.pid_exists(int(done.read_text() or 0))):
            time.sleep(0.01)
        return mlp(config, width_ratio)

    given = trials({"part": "first"}, {"part": "first"}, {"part": "last"}, {"part": "last"})
    assert list(find_kinds(replace(problem, model_fn=model_fn), given, children=2).value) == [0, 1, 2, 3]


def test_a_trial_whose_model_fails_fails_alone(problem: Problem) -> None:
    unit = find_kinds(replace(problem, model_fn=refuses_some), trials({}, {"bad": True}), 0)
    assert list(unit.value) == [0]
    (failed,) = [line for line in unit.lines if line["event"] == "failed"]
    assert failed["trial"] == 1
    assert "this configuration cannot be built" in failed["error"]


def test_what_forked_processes_found_of_structures_is_kept(without_width: Problem, traces: Callable[[], int]) -> None:
    given = trials({"activation": "relu"}, {"activation": "relu"}, {"activation": "tanh"}, {"activation": "tanh"})
    find_kinds(without_width, given, children=2)
    assert traces() == 2
    without_width.surrogate(given[1])
    without_width.surrogate(given[3])
    assert traces() == 2


def test_a_model_that_keeps_its_configuration_is_followed_once(
    without_width: Problem, traces: Callable[[], int]
) -> None:
    class Keeps(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config, self.body = config, fixed_mlp(config)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x)
            return out

    find_kinds(replace(without_width, model_fn=Keeps), trials({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}), children=0)
    assert traces() == 1


def by_activation(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return mlp({"activation": config["activation"]}, width_ratio)


def by_what_is_there(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return mlp({"dropout": 0.1} if "extra" in config else {}, width_ratio)


def by_what_is_nested(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return mlp({"activation": config["net"]["activation"]}, width_ratio)


def by_what_only_the_target_reads(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """The surrogates are alike, but not what their learning rates are scaled by."""
    width = 16 if width_ratio < 1 else 32 * (1 + (config["activation"] == "tanh"))
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def at_random(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return mlp({"activation": "relu" if torch.rand(()) < 0.5 else "tanh"}, width_ratio)


class Keeping(nn.Module):
    """What it reads, it reads later."""

    def __init__(self, config: Config, width_ratio: float = 1.0) -> None:
        super().__init__()
        self.body, self.config = mlp({}, width_ratio), config


WAYS = [by_activation, by_what_is_there, by_what_is_nested, by_what_only_the_target_reads, at_random, Keeping]


@pytest.mark.parametrize("model_fn", WAYS)
@pytest.mark.parametrize("takes_width", [True, False])
def test_no_shortcut_takes_one_structure_for_another(
    problem: Problem, model_fn: Callable[..., nn.Module], takes_width: bool
) -> None:
    """Each trial is of the kind that it is of alone, where its model is always built."""
    if not takes_width:
        build, problem = model_fn, problem.with_settings(sweep=SweepConfig(surrogate=1))
        model_fn = lambda config: build(config)  # noqa: E731
    alike: list[Config] = [
        {"activation": "relu", "net": {"activation": "relu"}, "batch_size": 32} for _ in range(ALIKE + 1)
    ]
    tanh: Config = {"activation": "tanh"}
    others: list[Config] = [tanh, {"net": tanh}, {"batch_size": 64}, {"extra": 1}]
    given = trials(*alike, *({**alike[0], **other} for other in others), *alike)
    problem = replace(problem, model_fn=model_fn)
    problem.surrogate(given[0])  # as a dry run does, which keeps its plan
    kinds = find_kinds(problem, given, 0).value
    assert kinds == {trial.number: find_kinds(problem, [trial], 0).value[trial.number] for trial in given}
    assert len(set(kinds.values())) > 1


def test_models_that_are_alike_are_not_all_built(problem: Problem) -> None:
    built: list[float] = []

    def model_fn(config: Config) -> nn.Module:
        built.append(len(built))
        return mlp({"activation": config["activation"]})

    given = trials(*({"lr": 0.1 * (1 + i), "activation": "relu", "colour": 1} for i in range(20)))
    unit = find_kinds(replace(problem, model_fn=model_fn).with_settings(sweep=SweepConfig(surrogate=1)), given, 0)
    assert len(built) == ALIKE
    assert len(set(unit.value.values())) == 1
    assert [line["unread"] for line in unit.lines] == [{"colour": None}] * 20


@pytest.mark.skipif(sys.platform != "linux", reason="processes that have computed are forked on Linux alone")
@pytest.mark.parametrize("times", [1, 1000])
def test_only_the_trial_whose_model_kills_each_process_fails(problem: Problem, tmp_path: Path, times: int) -> None:
    """One that is killed once, as where memory runs out, is built again; the others of its process are, too."""
    here = os.getpid()

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        if "deadly" in config and os.getpid() != here and len(list(tmp_path.iterdir())) < times:
            (tmp_path / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return mlp(config, width_ratio)

    given = trials({}, {}, {"deadly": True}, {}, {}, {})
    unit = find_kinds(replace(problem, model_fn=model_fn), given, children=2)
    failed = {line["trial"]: line["error"] for line in unit.lines if line["event"] == "failed"}
    assert set(unit.value) == {0, 1, 2, 3, 4, 5} - set(failed)
    told = "the process that built it died 2 times: SIGKILL, as where memory runs out"
    assert failed == ({} if times == 1 else {2: told})
    assert len(set(unit.value.values())) == 1


def test_what_an_objective_reads_splits_kinds_unless_it_is_a_float(problem: Problem) -> None:
    """Also after so many of one kind that others are believed to be alike without being built."""
    told = replace(problem, objective=as_objective(lambda model, batch, config: {}, nn.functional.mse_loss))
    configs = [{"penalty": "square", "scale": 0.1 * n} for n in range(ALIKE + 2)] + [{"penalty": "abs", "scale": 0.1}]
    kinds = list(find_kinds(told, trials(*configs), 1).value.values())
    assert len(set(kinds[:-1])) == 1
    assert kinds[-1] != kinds[0]
    assert len(set(find_kinds(problem, trials(*configs), 1).value.values())) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="processes that have computed are forked on Linux alone")
def test_a_trial_whose_model_is_built_without_end_fails_alone(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HangDetector, "TIMES", 1)
    monkeypatch.setattr(HangDetector, "LEAST_S", 3.0)

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        if "hangs" in config:
            threading.Event().wait()
        return mlp(config, width_ratio)

    given = trials({}, {}, {"hangs": True}, {}, {})
    unit = find_kinds(replace(problem, model_fn=model_fn), given, children=2)
    assert set(unit.value) == {0, 1, 3, 4}
    (failed,) = [line for line in unit.lines if line["event"] == "failed"]
    assert failed["trial"] == 2
    told = "the process that built it died 2 times: it was ended as it hung: no model was built for"
    assert told in failed["error"]
