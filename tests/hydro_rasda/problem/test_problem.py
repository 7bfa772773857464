from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from hydro_rasda.common.trial import Trial
from hydro_rasda.dry_run.dry_run import dry_run
from hydro_rasda.problem.problem import Problem
from surrogate import shrink
from surrogate.init_distributions import initial_laws
from surrogate.roles_and_multipliers import width_plan
from tests.hydro_rasda.models import Config, fixed_mlp, mlp
from tests.hydro_rasda.problems import X, problem, trials

pytestmark = pytest.mark.usefixtures("one_process")


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def test_batch_size_has_a_default() -> None:
    assert [Trial(0, {"batch_size": 7}).batch_size, Trial(0, {}).batch_size] == [7, 64]


@pytest.mark.parametrize("of", ["target", "surrogate"])
def test_initial_weights_depend_on_seed_and_number_alone(of: str) -> None:
    one = getattr(problem(), of)(Trial(3, {}))
    torch.rand(5)
    assert equal(getattr(problem(), of)(Trial(3, {"lr": 1.0})), one)
    assert not equal(getattr(problem(), of)(Trial(4, {})), one)
    assert not equal(getattr(problem(seed=1), of)(Trial(3, {})), one)


def test_a_model_function_may_change_its_configuration() -> None:
    def pops(config: Config, width_ratio: float = 1.0) -> nn.Module:
        config["nested"].pop("depth")
        return mlp(config, width_ratio)

    (trial,) = trials({"nested": {"depth": 2}})
    problem(pops).target(trial)
    problem(pops).surrogate(trial)
    assert trial.config["nested"] == {"depth": 2}


def test_full_width_sweeps_the_target_itself() -> None:
    (trial,) = trials()
    whole = problem(surrogate=1)
    assert equal(whole.surrogate(trial), whole.target(trial))


def recurrent(config: Config) -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.cell(x.unflatten(1, (8, 8)))[0][:, -1])
            return out

    return Recurrent()


def test_a_model_of_recurrent_layers_is_narrowed_and_the_run_says_so() -> None:
    found = dry_run(problem(recurrent), trials())
    assert found.narrowed is not None
    assert (found.narrowed.summary, found.narrowed.mostly_wide) == ("5 of 6 parameters are narrower", False)


def shrunk(model_fn: Any, *configs: Config) -> tuple[Problem, list[nn.Module]]:
    own = replace(problem(model_fn), example_input=(X[:4],))
    return own, [own.surrogate(trial) for trial in trials(*configs)]


def test_models_of_one_structure_are_narrowed_alike(traces: Callable[[], int]) -> None:
    own, models = shrunk(fixed_mlp, {"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3})
    assert (traces(), len(own.plans.by_structure)) == (1, 1)
    for trial, model in zip(trials({}, {}, {}), models):
        alone = shrink(own.target(trial), 0.5, own.example_input)
        assert equal(model, alone)
        assert width_plan(model) == width_plan(alone)


class Kept(nn.Module):
    """Keeps something of its configuration; a dropout above 1/2 adds the input to the output."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept, self.body = kept, nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out + x[:, :10] if isinstance(self.kept, float) and self.kept > 0.5 else out


@pytest.mark.parametrize(
    ("first", "second", "plans", "traced"),
    [
        (0.1, 0.2, 1, 1),
        (0.1, 0.9, 1, 2),
        ({"lr": 0.1}, {"lr": 0.2}, 1, 1),
        (2, 4, 2, 2),
    ],
)
def test_what_a_structure_is(first: Any, second: Any, plans: int, traced: int, traces: Callable[[], int]) -> None:
    own, (_, model) = shrunk(lambda config: Kept(config["kept"]), {"kept": first}, {"kept": second})
    assert (len(own.plans.by_structure), traces()) == (plans, traced)
    assert equal(model, shrink(own.target(trials({"kept": first}, {"kept": second})[1]), 0.5, own.example_input))


def test_what_cannot_be_looked_into_is_followed_each_time(traces: Callable[[], int]) -> None:
    def model_fn(config: Config) -> nn.Module:
        model = Kept(None)
        model.kept = model.get_parameter("body.0.weight").detach()[:1]  # a view, which a copy of the model loses
        return model

    own, _ = shrunk(model_fn, {}, {})
    assert (len(own.plans.by_structure), traces()) == (0, 2)


def scaled(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """Starts at a standard deviation that depends on the width as its configuration says."""
    model = mlp(config, width_ratio)
    nn.init.normal_(model.get_parameter("2.weight"), std=width_ratio ** config["power"])
    return model


def test_laws_are_read_once_for_all_configurations_that_agree_in_what_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Mock(side_effect=initial_laws)
    monkeypatch.setattr(importlib.import_module("surrogate.build"), "initial_laws", read)
    given = trials(*({"lr": lr, "power": power} for lr, power in [(0.1, 1), (0.2, 1), (0.3, 2), (0.4, 1)]))
    own = problem(scaled)
    models = [own.surrogate(trial) for trial in given]
    assert read.call_count == 2 * 2  # two widths, two powers
    for trial, model in zip(given, models):
        alone = problem(scaled).surrogate(trial)
        assert equal(model, alone)
        assert width_plan(model) == width_plan(alone)


def test_a_plan_for_a_model_of_other_shapes_is_not_used() -> None:
    inputs = [64]

    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs[0], int(32 * width_ratio)), nn.ReLU(), mlp(config, width_ratio))

    own, given = problem(model_fn), trials({}, {})
    own.surrogate(given[0])
    inputs[0] = 16  # nothing that the configuration says
    model, alone = own.surrogate(given[1]), problem(model_fn).surrogate(given[1])
    assert equal(model, alone)
    assert width_plan(model) == width_plan(alone)


def test_weights_that_must_be_measured_are_for_each_trial() -> None:
    def normalized(config: Config, width_ratio: float = 1.0) -> nn.Module:
        model = mlp(config, width_ratio)
        weight = model.get_parameter("2.weight")
        weight.data = weight.data / weight.data.norm()
        return model

    own = problem(normalized)
    first, second = (own.surrogate(trial) for trial in trials({}, {}))
    assert list(own.plans.by_reads.values()) == [None]
    assert equal(second, problem(normalized).surrogate(trials({}, {})[1]))
    assert not equal(first, second)


def test_a_model_in_evaluation_mode_is_another_structure(traces: Callable[[], int]) -> None:
    shrunk(lambda config: fixed_mlp(config).train(config["train"]), {"train": True}, {"train": False})
    assert traces() == 2
