"""Learning rates by role, against the same rates by the parameters' names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fusion.optim import OPTIMIZERS
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import Share
from hydro_rasda.dry_run.dry_run import dry_run
from hydro_rasda.problem.lr_roles import by_parameter, roles_of
from hydro_rasda.problem.problem import Problem
from hydro_rasda.training.full_size import full_size_learner
from hydro_rasda.training.fused_learner import FusedLearner
from tests.hydro_rasda.problems import LABELS, X, problem, trials

pytestmark = pytest.mark.usefixtures("one_process")

BY_ROLE = {"lr.embedding": 0.3, "lr.hidden": 0.02, "lr.head": 0.005}
BY_NAME = {"lr.0.weight": 0.3, "lr.2.weight": 0.02, "lr.4.weight": 0.005}
ROLES = {"first.weight": "embedding", "first.bias": None, "second.weight": "hidden", "head.weight": "head"}


def deep(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    width = int(16 * width_ratio)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def untold(config: dict[str, Any]) -> nn.Module:
    """A model that takes no width ratio."""
    return deep(config)


def test_a_name_comes_before_a_role() -> None:
    assert by_parameter({"lr": 1, "lr.embedding": 2}, ROLES) == {"lr": 1, "lr.first.weight": 2}
    # A part of that name.
    assert by_parameter({"lr": 1, "lr.head": 2}, ROLES) == {"lr": 1, "lr.head": 2}
    both = {"lr": 1, "lr.second": 3}
    with pytest.raises(ValueError, match=r"`lr\.hidden` is 2, but must be left out: .* has that role"):
        by_parameter({**both, "lr.hidden": 2}, ROLES)
    kept = by_parameter({**both, "lr.hidden": 2}, {**ROLES, "third.weight": "hidden"})
    assert kept == {**both, "lr.third.weight": 2}
    with pytest.raises(ValueError, match=r"`lr\.head` is 2, but must be left out: no part of the model has the name"):
        by_parameter({"lr": 1, "lr.head": 2}, {"first.weight": "embedding"})


def _learners(of: Problem, config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return weights after steps of one fused surrogate beside another one's, and of the full-size model."""
    pair = trials({**config, "lr": 0.05}, {"optimizer": config["optimizer"], "lr": 0.01})
    fused = FusedLearner([of.surrogate(trial) for trial in pair], [trial.config for trial in pair], of)
    single = full_size_learner(of, pair[0])
    for learner in (fused, single):
        learner.train_mode(True)
        for epoch in range(2):
            for share in of.train_data.epoch(4, epoch):
                learner.step(Share(share, 4, 4.0), float(epoch), 3.0)
    return dict(fused.fused.stacked), dict(single.model.named_parameters())


@pytest.mark.parametrize(
    ("optimizer", "model_fn"),
    [
        *((name, deep) for name in OPTIMIZERS if name != "adadelta"),
        *((name, untold) for name in ("sgd", "muon")),
        *(
            pytest.param(name, untold, marks=pytest.mark.slow)
            for name in OPTIMIZERS
            if name not in ("adadelta", "sgd", "muon")
        ),
    ],
)
def test_rates_by_role_are_those_by_name(optimizer: str, model_fn: Any) -> None:
    of = replace(problem(model_fn), example_input=(X[:2],))
    by_role, by_name = (_learners(of, {"optimizer": optimizer, **rates}) for rates in (BY_ROLE, BY_NAME))
    for found, expected in zip(by_role, by_name, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_with_muon_roles_come_before_the_rate_of_adamw() -> None:
    config = {"optimizer": "muon", "lr": 0.02, "lr.adamw": 0.001, "lr.head": 0.005}
    learner = full_size_learner(problem(deep), Trial(0, {"batch_size": 4, **config}))
    names = {id(p): name for name, p in learner.model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in learner.optimizer.param_groups for p in group["params"]}
    assert rates == {
        **dict.fromkeys(["0.weight", "2.weight"], 0.02),
        **dict.fromkeys(["0.bias", "2.bias", "4.bias"], 0.001),
        "4.weight": 0.005,
    }


@pytest.mark.parametrize("model_fn", [deep, untold])
@pytest.mark.parametrize("surrogate", [0.5, 1.0])
def test_the_dry_run_finds_roles_at_each_width(model_fn: Any, surrogate: float) -> None:
    of = problem(model_fn, (X, LABELS), surrogate=surrogate)
    trial = trials(BY_ROLE)[0]
    found = dry_run(of, [trial])
    of = replace(of, example_input=found.example_input)
    assert roles_of(of.target(trial)) == roles_of(of.surrogate(trial))
    assert roles_of(of.target(trial))["4.weight"] == "head"
    with pytest.raises(ValueError, match=r"`lr\.hidden` is 0\.02, but must be left out"):
        dry_run(of, trials({**BY_ROLE, "lr.2": 0.1}))


def fixed(config: dict[str, Any]) -> nn.Module:
    """A model that cannot be made narrower: no size is free."""
    return nn.ModuleDict({"head": nn.Linear(64, 10)})["head"] if "plain" in config else Headed()


class Headed(nn.Module):
    """One layer, named as a role."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(x)
        return y


def test_a_model_that_cannot_be_made_narrower_needs_names() -> None:
    of = problem(fixed, surrogate=1)
    dry_run(of, trials({"lr.head": 0.1}))  # the name of a part, which needs no role
    with pytest.raises(ValueError, match=r"`lr\.head` needs the roles of parameters, .* give names of its parts"):
        dry_run(of, trials({"lr.head": 0.1, "plain": True}))


def test_a_group_that_goes_on_takes_new_rates_by_role() -> None:
    of, plain = problem(deep), {"optimizer": "adamw", "lr": 0.1}
    learners = [FusedLearner([of.surrogate(Trial(0, plain))], [plain], of) for _ in range(2)]
    for learner, rates in zip(learners, (BY_ROLE, BY_NAME), strict=True):
        learner.go_on([{**plain, **rates}], {})
        learner.step(Share(next(of.train_data.epoch(4, 0)), 4, 4.0), 0.0, 3.0)
    one, other = (dict(learner.fused.stacked) for learner in learners)
    assert all(torch.equal(one[name], other[name]) for name in one)
