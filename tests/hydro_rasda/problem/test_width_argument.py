""" """

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from hydro_rasda import SweepConfig, loguniform, tune
from hydro_rasda.dry_run.dry_run import dry_run
from hydro_rasda.dry_run.dry_run_and_hints import get_ready
from hydro_rasda.problem.lr_roles import roles_of
from hydro_rasda.problem.width_argument import MOST, Plans, check_width_argument, width_form
from surrogate import ShrinkPlan, SurrogatePlan, lr_multipliers
from tests.hydro_rasda.models import Config, fixed_mlp, mlp
from tests.hydro_rasda.problems import LABELS, X, problem, trials


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
    assert line == taken


def test_an_argument_that_may_be_no_ratio_keeps_its_value_and_the_run_says_so() -> None:
    assert width_form(never_a_ratio) is None
    (line,) = get_ready(problem(never_a_ratio), {"lr": 0.1, "schedule": "linear"}, trials()).messages
    assert line == "`model_fn` keeps `dropout=1.0`: to build narrower models by it, call it `width_ratio`"


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


def test_a_model_function_of_hyperparameters_one_by_one_is_refused(tmp_path: Path) -> None:
    def by_name(lr: float, dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 10), nn.Dropout(dropout))

    told = r"`model_fn` has the second argument `dropout`, .* `space` has a key of that name.* read config\['dropout'\]"
    space = {"lr": loguniform(1e-3, 1), "dropout": 0.1}
    with pytest.raises(ValueError, match=told):
        tune(by_name, space, train_data=(X, LABELS), val_data=(X, LABELS), storage_path=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_function_without_a_width() -> None:
    assert width_form(fixed_mlp) is None
    checked = dry_run(problem(fixed_mlp), trials())
    assert [tuple(t.shape) for t in checked.example_input] == [(4, 64)]


class Block(nn.Module):
    """A residual block whose branch is divided by the depth ratio."""

    def __init__(self, width: int, depth_ratio: float) -> None:
        super().__init__()
        self.branch, self.depth_ratio = nn.Linear(width, width), depth_ratio

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.branch(x).relu() / self.depth_ratio
        return y


def residual(config: Config, width_ratio: float = 1.0, depth_ratio: float = 1.0) -> nn.Module:
    width = int(32 * width_ratio)
    blocks = [Block(width, depth_ratio) for _ in range(int(4 * depth_ratio))]
    return nn.Sequential(nn.Linear(64, width), nn.Sequential(*blocks), nn.Linear(width, 10))


@pytest.mark.parametrize("by_name", [True, False])
def test_surrogates_may_be_shallower(by_name: bool) -> None:
    own = problem(residual if by_name else lambda config, r, depth_ratio=1.0: residual(config, r, depth_ratio))
    own = own.with_settings(sweep=SweepConfig(surrogate=0.25, depth=0.5))
    (trial,) = trials({"lr.hidden": 0.01})
    narrow, target = own.surrogate(trial), own.target(trial)
    assert [len(model.get_submodule("1")) for model in (narrow, target)] == [2, 4]  # type: ignore[arg-type]
    assert narrow.get_submodule("1.0").depth_ratio == 0.5
    # Widths, and so multipliers, are those against a wide model.
    rates = lr_multipliers(narrow, "adamw")
    assert (rates["0.weight"], rates["1.1.branch.weight"]) == (1, 4)
    assert [roles_of(model)["1.1.branch.weight"] for model in (narrow, target)] == ["hidden", "hidden"]
    assert roles_of(target)["1.3.branch.weight"] == "hidden"


def test_a_run_with_shallow_surrogates(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train_data": (X, LABELS), "val_data": (X, LABELS), "storage_path": tmp_path}
    settings |= {"num_samples": 4, "max_t": 2, "progress": False, "name": "shallow"}
    result = tune(residual, {"lr": loguniform(1e-3, 1e-1)}, **settings, sweep=SweepConfig(depth=0.5))
    assert len(result.best_model().get_submodule("1")) == 4  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sweep\.depth was 0\.5, now 1"):
        tune(residual, {"lr": loguniform(1e-3, 1e-1)}, **settings)


@pytest.mark.parametrize("model_fn", [mlp, fixed_mlp, lambda config, width_ratio, depth_ratio=2.0: None])
def test_shallow_surrogates_need_an_argument(model_fn: Any) -> None:
    rule = r"`sweep\.depth` is 0\.5, but must be 1, unless `model_fn` takes"
    with pytest.raises(ValueError, match=rule):
        tune(model_fn, {"lr": 0.1}, train_data=(X, LABELS), val_data=(X, LABELS), sweep=SweepConfig(depth=0.5))
    swept = SweepConfig(depth=0.5, surrogate=1)
    with pytest.raises(ValueError, match=r"must be 1, as the sweep trains the model itself"):
        tune(residual, {"lr": 0.1}, train_data=(X, LABELS), val_data=(X, LABELS), sweep=swept)
    with pytest.raises(ValueError, match=r"`sweep\.depth` is 2, but must be a depth ratio in \(0, 1\]"):
        SweepConfig(depth=2)


PLAN = SurrogatePlan(0.5, {}, {}, {})
READS = frozenset({("", "['a', 'lr']"), ("a", "1")})


def test_a_plan_holds_for_configurations_that_agree_in_what_was_read() -> None:
    plans = Plans()
    plans.keep_for_reads(0.5, READS, PLAN)
    assert plans.known_for(0.5, {"a": 1, "lr": 0.1}) == (0.5, READS)
    assert plans.known_for(0.5, {"a": 2, "lr": 0.1}) is None
    assert plans.known_for(0.25, {"a": 1, "lr": 0.1}) is None


def test_what_another_process_found_is_taken_over() -> None:
    plans, other = Plans(), Plans()
    other.keep_for_reads(0.5, READS, None)
    other.keep_for_structure("one", ShrinkPlan(0.5, {}, None, ""))
    plans.update(other)
    assert plans == other


def test_no_more_are_kept_than_serve_anybody() -> None:
    plans = Plans()
    for number in range(MOST + 5):
        plans.keep_for_reads(0.5, frozenset({("lr", str(number))}), PLAN)
        plans.keep_for_structure(str(number), ShrinkPlan(0.5, {}, None, ""))
    assert len(plans.by_reads) == len(plans.by_structure) == MOST
