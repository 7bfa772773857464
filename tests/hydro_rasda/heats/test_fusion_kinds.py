"""The kinds of trials that fuse, and the keys of a configuration that nobody reads."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion.keys import KEYS
from hydro_rasda import SweepConfig, TuneResult, Worker, choice, loguniform, sample_from, uniform
from hydro_rasda.common.trial import Trial
from hydro_rasda.heats.fusion_kinds import ALIKE, build_noting, find_kinds
from hydro_rasda.heats.unused_keys import unread_of, warn_of_unread
from hydro_rasda.problem.objective import as_objective
from hydro_rasda.problem.problem import Problem
from hydro_rasda.problem.read_keys import Notes
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.space.space import ALIASES
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


@pytest.mark.parametrize(("children", "built"), [(0, [0]), (2, [0, 1])])
def test_where_time_is_up_each_process_builds_its_first_model_alone(
    problem: Problem, children: int, built: list[int]
) -> None:
    unit = find_kinds(problem, trials({}, {}, {}, {}), children, until=0.0)
    assert list(unit.value) == [line["trial"] for line in unit.lines] == built


@pytest.mark.skipif(sys.platform != "linux", reason="processes that have computed are forked on Linux alone")
def test_where_time_is_up_no_trial_before_the_last_is_missing(problem: Problem) -> None:
    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        time.sleep(config["takes"])
        return mlp(config, width_ratio)

    given = trials(*({"takes": takes} for takes in (0.0, 2.0, 0.0, 0.0, 0.0, 0.0)))
    unit = find_kinds(replace(problem, model_fn=model_fn), given, 2, until=time.monotonic() + 1.0)
    assert list(unit.value) == [line["trial"] for line in unit.lines] == [0, 1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="processes that have computed are forked on Linux alone")
def test_kinds_are_in_the_order_of_the_trials_whichever_child_is_done_first(problem: Problem, tmp_path: Path) -> None:
    done = tmp_path / "done"

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        if config["part"] == "last":
            done.write_text(str(os.getpid()))
        while config["part"] == "first" and not (done.exists() and not psutil.pid_exists(int(done.read_text() or 0))):
            time.sleep(0.01)
        return mlp(config, width_ratio)

    given = trials({"part": "first"}, {"part": "last"}, {"part": "first"}, {"part": "last"})
    assert list(find_kinds(replace(problem, model_fn=model_fn), given, children=2).value) == [0, 1, 2, 3]


def test_a_trial_whose_model_fails_fails_alone(problem: Problem) -> None:
    unit = find_kinds(replace(problem, model_fn=refuses_some), trials({}, {"bad": True}), 0)
    assert list(unit.value) == [0]
    (failed,) = [line for line in unit.lines if line["event"] == "failed"]
    assert failed["trial"] == 1
    assert "this configuration cannot be built" in failed["error"]


def test_what_forked_processes_found_of_structures_is_kept(without_width: Problem, traces: Callable[[], int]) -> None:
    given = trials({"activation": "relu"}, {"activation": "tanh"}, {"activation": "relu"}, {"activation": "tanh"})
    find_kinds(without_width, given, children=2)
    assert traces() == 2
    without_width.surrogate(given[2])
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


@pytest.mark.parametrize("objective", [None, lambda model, batch, config: {}])
def test_models_that_are_alike_are_not_all_built(problem: Problem, objective: Any) -> None:
    """Also not if the objective reads configurations."""
    built: list[float] = []
    problem = replace(problem, objective=as_objective(objective, nn.functional.mse_loss))

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


@pytest.mark.slow
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


CONFIG: Config = {"lr": 0.1, "a": 1, "b": 2, "net": {"depth": 3, "width": 4, "none": {}}}
OWN = {"a", "b", "net.depth", "net.width", "net.none"}


def unread(problem: Problem, reads: Callable[[Config], object], config: Config = CONFIG) -> dict[str, str | None]:
    def model_fn(given: Config, width_ratio: float = 1.0) -> nn.Module:
        reads(given)
        return mlp({}, width_ratio)

    return unread_of(build_noting(replace(problem, model_fn=model_fn), Trial(0, config))[1], config)


@pytest.mark.parametrize(
    ("reads", "left"),
    [
        (lambda c: None, OWN),
        (lambda c: c["a"], OWN - {"a"}),
        (lambda c: c.get("a", 0), OWN - {"a"}),
        (lambda c: "a" in c, OWN - {"a"}),
        (lambda c: c.pop("a"), OWN - {"a"}),
        (lambda c: c.setdefault("a", 0), OWN - {"a"}),
        (lambda c: "{a}".format_map(c), OWN - {"a"}),
        (lambda c: c["net"], OWN),
        (lambda c: c["net"]["depth"], OWN - {"net.depth"}),
        (lambda c: dict(c["net"]), {"a", "b"}),
    ],
)
def test_what_is_read_is_noted(problem: Problem, reads: Callable[[Config], object], left: set[str]) -> None:
    assert unread(problem, reads).keys() == left


@pytest.mark.parametrize(
    "reads",
    [
        lambda c: SimpleNamespace(**c),
        dict,
        list,
        sorted,
        json.dumps,
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        lambda c: {**c},
        lambda c: c | {},
        lambda c: {} | c,
        lambda c: {}.update(c),
        lambda c: c == {},
        lambda c: c.copy(),
        lambda c: c.items(),
        lambda c: c.values(),
        lambda c: c.popitem(),
    ],
)
def test_whoever_goes_through_a_configuration_reads_all(problem: Problem, reads: Callable[[Config], object]) -> None:
    assert unread(problem, reads) == {}


@pytest.mark.parametrize("part", [lambda c: c, lambda c: c["net"], lambda c: lambda: c])
def test_what_the_model_keeps_may_be_read_later(problem: Problem, part: Callable[[Config], object]) -> None:
    class Keeping(nn.Module):
        def __init__(self, config: Config, width_ratio: float = 1.0) -> None:
            super().__init__()
            self.body, self.kept = mlp({}, width_ratio), part(config)

    built, notes = build_noting(replace(problem, model_fn=Keeping), Trial(0, CONFIG))
    assert unread_of(notes, CONFIG) == {}
    if isinstance(built.kept, dict):
        assert type(built.kept) is dict


def test_a_model_function_that_takes_nothing_but_a_dict(problem: Problem) -> None:
    def strict(config: Config, width_ratio: float = 1.0) -> nn.Module:
        assert type(config) is dict
        return mlp(config, width_ratio)

    assert build_noting(replace(problem, model_fn=strict), Trial(0, CONFIG))[1] is None


def test_the_library_reads_by_what_else_is_configured(problem: Problem) -> None:
    config = {"lr": 0.1, "batch_size": 8, "momentum": 0.9, "gamma": 0.5, "rescale_warmup_epochs": 1}
    assert unread(problem, lambda c: None, config).keys() == {"momentum", "gamma"}
    assert unread(problem, lambda c: None, {**config, "optimizer": "sgd"}).keys() == {"gamma"}
    assert unread(problem, lambda c: c["gamma"], {**config, "optimizer": "sgd"}) == {}


def test_the_key_that_was_meant(problem: Problem) -> None:
    config = {"lr": 0.1, "weight_deacy": 0.1, "clip_grad": 1.0, "drop_uot": 0.5, "colour": 1}
    meant = {"weight_deacy": "weight_decay", "clip_grad": "grad_clip", "drop_uot": "drop_out", "colour": None}
    assert unread(problem, lambda c: c.get("drop_out", 0.0), config) == meant


def test_what_is_unread_is_told_with_what_was_meant() -> None:
    with pytest.warns(UserWarning, match=r"neither `model_fn` nor the library reads `x` \(did you mean `y`\?\): what"):
        warn_of_unread({"x": "y"})
    with pytest.warns(UserWarning, match=r"`momentum` \(read where `optimizer` is sgd or rmsprop or .*\)"):
        warn_of_unread({"momentum": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unread({})


@pytest.mark.parametrize("alias", ALIASES)
def test_names_of_other_libraries_are_answered_by_ours(alias: str) -> None:
    assert alias not in KEYS
    assert unread_of(Notes(), {"lr": 0.1, alias: 1}) == {alias: ALIASES[alias] if ALIASES[alias] != "lr" else None}


Quick = Callable[..., TuneResult]
LR: dict[str, Any] = {"lr": loguniform(1e-3, 0.3)}


@pytest.mark.parametrize("resumed", [False, True])
def test_tune_warns_once(quick: Quick, resumed: bool) -> None:
    space = {**LR, "weight_deacy": uniform(0.0, 0.1), "optimizer": choice(["sgd", "adam"]), "momentum": 0.9}
    for _ in range(1 + resumed):
        with pytest.warns(UserWarning, match=r"reads `weight_deacy` \(did you mean `weight_decay`\?\): ") as told:
            quick(space=space, max_t=1, num_samples=4)
        assert len([w for w in told if "neither" in str(w.message)]) == 1


@pytest.mark.filterwarnings("error")
def test_a_training_function_of_the_users_own_may_read_any_key(quick: Quick) -> None:
    def train(worker: Worker) -> None:
        assert 0 <= worker.config["lr_g"] <= 1
        model = mlp(worker.config)
        worker.report({"val_loss": worker.config["lr_g"]}, {"model": model.state_dict()})

    result = quick(space={**LR, "lr_g": uniform(0, 1)}, max_t=1, num_samples=2, train=train, loss_fn=F.cross_entropy)
    assert result.best_metric == result.best_config["lr_g"]


@pytest.mark.filterwarnings("error")
def test_conditional_keys(quick: Quick) -> None:
    """As the guide has them: None where they do not apply, which the library does not look at."""
    space = {
        **LR,
        "optimizer": choice(["sgd", "adamw"]),
        "momentum": sample_from(lambda config: random.uniform(0.5, 0.9) if config.optimizer == "sgd" else None),
        "activation": choice(["relu", "tanh"]),
        "slope": sample_from(lambda config: random.random() if config.activation == "tanh" else None),
    }
    result = quick(space=space, max_t=1, num_samples=8)
    for trial in result.trials:
        assert trial.status in ("finished", "stopped")
        assert (trial.config["momentum"] is None) == (trial.config["optimizer"] == "adamw")
        assert (trial.config["slope"] is None) == (trial.config["activation"] == "relu")
    assert len({trial.config["slope"] for trial in result.trials}) > 2
    assert result.to_optuna().best_trial.number == result.best_trial


@pytest.mark.filterwarnings("error")
def test_what_another_value_is_computed_from_counts(quick: Quick) -> None:
    space = {**LR, "scale": uniform(0.0, 0.5), "dropout": sample_from(lambda spec: spec.config.scale / 2)}
    quick(space=space, max_t=1, num_samples=4)


@pytest.mark.filterwarnings("error")
def test_parts_of_the_model_may_have_learning_rates_of_their_own(quick: Quick) -> None:
    result = quick(space={**LR, "lr.4": loguniform(1e-3, 0.3)}, max_t=2, num_samples=6)
    assert result.finished
    with pytest.raises(ValueError, match=r"`lr\.body` is .*, but must be left out: no parameter's name begins"):
        quick(space={**LR, "lr.body": loguniform(1e-3, 0.3)}, name="other")
    with pytest.raises(ValueError, match=r"`space\['lr\.4'\]` is .*, but must be a finite number > 0"):
        quick(space={**LR, "lr.4": uniform(0.0, 0.3)}, name="third")


def test_what_the_objective_reads_is_read(quick: Quick) -> None:
    def objective(model: nn.Module, batch: Any, config: Any) -> dict[str, Tensor]:
        output = model(batch[0])
        return {"loss": F.cross_entropy(output, batch[1]) + config["scale"] * output.square().mean()}

    space = {**LR, "scale": uniform(0.0, 0.1), "scael": uniform(0.0, 0.1)}
    with pytest.warns(UserWarning, match="nor the library reads `scael`: what") as told:
        result = quick(space=space, max_t=1, num_samples=4, objective=objective)
    assert len(told) == 1
    assert result.finished


def test_a_key_of_a_branch_is_told_where_no_trial_of_the_branch_reads_it(quick: Quick) -> None:
    branches = choice([{"optimizer": "sgd", "momentun": 0.9}, {"optimizer": "adamw", "beta1": 0.8, "momentum": 0.9}])
    with pytest.warns(
        UserWarning, match=r"reads `momentum` \(read where .*\), `momentun` \(did you mean `momentum`\?\): "
    ):
        quick(space={**LR, "by": branches}, num_samples=8, max_t=1)
