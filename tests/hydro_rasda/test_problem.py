from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from hydro_rasda import SweepConfig, tune
from hydro_rasda.config import TuneConfig
from hydro_rasda.data import Data, make_batches
from hydro_rasda.dry_run import dry_run
from hydro_rasda.objective import Objective, supervised
from hydro_rasda.problem import Problem, check_width_argument, width_form
from hydro_rasda.stages.preparation import get_ready
from hydro_rasda.trial import Trial
from surrogate import shrink
from surrogate.init_distributions import initial_laws
from surrogate.multipliers import width_plan
from tests.hydro_rasda.models import Config, fixed_mlp, mlp

X = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 10
CPU = torch.device("cpu")


def problem(
    model_fn: Any = mlp,
    data: Data = (X, LABELS),
    objective: Objective | None = None,
    metric: str = "val_loss",
    surrogate: float = 0.5,
    seed: int = 0,
) -> Problem:
    return Problem(
        model_fn=model_fn,
        objective=objective or supervised(),
        train_data=make_batches(data, "train_data", CPU, seed),
        val_data=make_batches(data, "val_data", CPU, seed),
        settings=TuneConfig(sweep=SweepConfig(surrogate=surrogate), metric=metric, max_t=4, seed=seed),
        device=CPU,
    )


def trials(*configs: Config) -> list[Trial]:
    return [Trial(number, {"lr": 0.1, "batch_size": 4, **config}) for number, config in enumerate(configs or ({},))]


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


def second_argument(config: Config, ratio: float) -> nn.Module:
    return mlp(config, ratio)


def keyword_only(config: Config, *, depth: int = 2, width_ratio: float = 1.0) -> nn.Module:
    return mlp(config, width_ratio)


@pytest.mark.parametrize("model_fn", [mlp, second_argument, keyword_only])
def test_forms_of_a_model_function_with_a_width(model_fn: Any) -> None:
    assert width_form(model_fn) is not None
    checked = dry_run(problem(model_fn), trials())
    assert checked.parameters["0.weight"] == "(32, 64) torch.float32"
    assert problem(model_fn).surrogate(trials()[0]).get_parameter("0.weight").shape == (16, 64)


def by_r(config: Config, r: float = 1.0) -> nn.Module:
    return mlp(config, r)


def of_scale(config: Config, scale: float = 1.0, dropout: float = 1.0) -> nn.Module:
    return mlp(config, scale)


def ignores_it(config: Config, scale: float = 1.0) -> nn.Module:
    return mlp(config, 1.0)


def never_a_ratio(config: Config, dropout: float = 1.0) -> nn.Module:
    return mlp(config, 1.0)


@pytest.mark.parametrize(("model_fn", "name"), [(by_r, "r"), (of_scale, "scale")])
def test_a_second_argument_that_is_called_as_a_ratio_is_taken_and_the_run_says_so(model_fn: Any, name: str) -> None:
    assert width_form(model_fn) == "second"
    own = problem(model_fn)
    assert own.surrogate(trials()[0]).get_parameter("0.weight").shape == (16, 64)
    (line,) = get_ready(own, {"lr": 0.1, "schedule": "linear"}, trials()).messages
    taken = f"the width ratio is the second argument of `model_fn`, `{name}`"
    assert line == f"surrogates have 0.5 of the width: 5 of 6 parameters are narrower; {taken}"


def test_an_argument_that_may_be_no_ratio_keeps_its_value_and_the_run_says_so() -> None:
    assert width_form(never_a_ratio) is None
    (line,) = get_ready(problem(never_a_ratio), {"lr": 0.1, "schedule": "linear"}, trials()).messages
    assert line.endswith("; `model_fn` keeps `dropout=1.0`: to build narrower models by it, call it `width_ratio`")


def test_a_ratio_that_changes_nothing_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"ignores width_ratio: .*the second argument of `model_fn`, `scale`\)"):
        dry_run(problem(ignores_it), trials())


@pytest.mark.parametrize("default", [1, 1.0])
def test_an_optional_width_of_another_name_and_place_is_refused(default: float, tmp_path: Path) -> None:
    def model_fn(config: Config, depth: int = 2, width: float = default) -> nn.Module:
        return mlp(config, width)

    def other(config: Config, width: int = 64, ratio: float = 1.0) -> nn.Module:
        return mlp(config, 1.0)

    with pytest.raises(
        ValueError, match=rf"`model_fn` has an argument `width={default}` that is not used: call it `wid"
    ):
        tune(model_fn, {"lr": 0.1}, train_data=(X, LABELS), val_data=(X, LABELS), storage_path=tmp_path)
    assert not list(tmp_path.iterdir())
    for allowed, surrogate in ((model_fn, 1), (mlp, 0.5), (second_argument, 0.5), (other, 0.5)):
        check_width_argument("model_fn", allowed, surrogate)


def test_two_arguments_that_may_be_the_ratio_are_refused() -> None:
    def model_fn(config: Config, scale: float = 1.0, width: float = 1.0) -> nn.Module:
        return mlp(config, width)

    with pytest.raises(ValueError, match=r"`model_fn` has `scale=1.0`, `width=1.0`, each of which may be the width"):
        check_width_argument("model_fn", model_fn, 0.5)


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
    assert (found.narrowed, found.mostly_wide) == ("5 of 6 parameters are narrower", False)


def test_a_model_function_without_a_width() -> None:
    assert width_form(fixed_mlp) is None
    checked = dry_run(problem(fixed_mlp), trials())
    assert [tuple(t.shape) for t in checked.example_input] == [(4, 64)]


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
