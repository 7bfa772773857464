from __future__ import annotations

import copy
import json
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from fusion.hyperparameters import KEYS
from hydro_rasda import RaceConfig, TuneResult, Worker, choice, loguniform, sample_from, uniform
from hydro_rasda.config_access import Notes
from hydro_rasda.problem import Problem
from hydro_rasda.space import ALIASES
from hydro_rasda.stages.unused_keys import build_noting, unread_of, warn_of_unread
from hydro_rasda.trial import Trial
from tests.hydro_rasda.models import Config, mlp

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

    result = quick(space={**LR, "lr_g": uniform(0, 1)}, max_t=1, num_samples=2, race=RaceConfig(train=train))
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
