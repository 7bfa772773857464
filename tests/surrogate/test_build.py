from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surrogate
from surrogate import PlanMismatch, make_surrogate, plan_surrogate
from surrogate.roles_and_multipliers import width_plan
from tests.surrogate.models import ZOO, mlp


def test_public_names() -> None:
    assert surrogate.__all__ == [
        "PlanMismatch",
        "ShrinkPlan",
        "SurrogatePlan",
        "compare_rankings",
        "coordinate_check",
        "doubtful_hyperparameters",
        "lr_multipliers",
        "make_surrogate",
        "parameter_roles",
        "plain_score_fn",
        "plan_shrink",
        "plan_surrogate",
        "shrink",
        "transfer_check",
        "weight_decay_multipliers",
    ]


@pytest.mark.parametrize("name", ZOO)
def test_runs_on_the_batch_at_a_quarter_of_the_width(name: str) -> None:
    model_fn, config, batch = ZOO[name]
    narrow = make_surrogate(model_fn, config, 1 / 4, example_input=batch)
    wide = model_fn(config, 1.0)
    assert dict(narrow.named_parameters()).keys() == dict(wide.named_parameters()).keys()
    assert sum(p.numel() for p in narrow.parameters()) < 0.5 * sum(p.numel() for p in wide.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_the_same_seed_gives_the_same_surrogate(name: str) -> None:
    model_fn, config, _ = ZOO[name]
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(make_surrogate(model_fn, config, 1 / 4).state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key])


def test_draws_from_the_global_generator_what_the_model_itself_draws() -> None:
    torch.manual_seed(3)
    make_surrogate(mlp, {}, 1 / 4)
    after_surrogate = torch.rand(1)
    torch.manual_seed(3)
    mlp({}, 1 / 4)
    assert torch.equal(after_surrogate, torch.rand(1))


def test_width_one_is_the_target_itself() -> None:
    torch.manual_seed(3)
    target = make_surrogate(mlp, {}, 1.0)
    torch.manual_seed(3)
    plain = mlp({}, 1.0)
    for ours, theirs in zip(target.parameters(), plain.parameters()):
        assert torch.equal(ours, theirs)
    x = torch.randn(4, 64)
    assert torch.equal(target(x), plain(x))


def test_a_model_that_cannot_be_built_on_meta() -> None:
    def reads_values(config: Any, width_ratio: float) -> nn.Module:
        rates = [float(rate) for rate in torch.linspace(0, 0.1, 2)]
        return nn.Sequential(mlp(config, width_ratio), nn.Dropout(rates[1]))

    assert width_plan(make_surrogate(reads_values, {}, 1 / 4)).readouts == {"0.4": 4.0}


def test_example_input_leaves_running_statistics_alone() -> None:
    model_fn, config, batch = ZOO["cnn"]
    narrow = make_surrogate(model_fn, config, 1 / 4, example_input=batch)
    assert narrow.get_buffer("1.num_batches_tracked") == 0


def test_survives_deepcopy_and_vmap() -> None:
    narrow = make_surrogate(mlp, {}, 1 / 4)
    x = torch.randn(5, 64)
    assert torch.equal(copy.deepcopy(narrow)(x), narrow(x))
    stacked = {name: torch.stack([p, 2 * p]) for name, p in narrow.named_parameters()}

    def run(parameters: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(narrow, parameters, (x,))

    assert torch.allclose(torch.vmap(run)(stacked)[0], narrow(x), atol=1e-5)


def fails(config: Any, width_ratio: float) -> nn.Module:
    raise KeyError("hidden")


def no_module(config: Any, width_ratio: float) -> Any:
    return [nn.Linear(2, 2)]


def ignores(config: Any, width_ratio: float) -> nn.Module:
    return nn.Linear(8, 8)


def deeper(config: Any, width_ratio: float) -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(int(8 * width_ratio))])


def grows(config: Any, width_ratio: float) -> nn.Module:
    return nn.Linear(8, int(8 / width_ratio))


def lazy(config: Any, width_ratio: float) -> nn.Module:
    return nn.LazyLinear(int(8 * width_ratio))


def without_data(config: Any, width_ratio: float) -> nn.Module:
    return nn.Linear(8, int(8 * width_ratio), device="meta")


def three_widths(config: Any, width_ratio: float) -> nn.Module:
    module, width = nn.Linear(8, 8), int(8 * width_ratio)
    module.weight = nn.Parameter(torch.zeros(width, width, width))
    return module


def output_grows(config: Any, width_ratio: float) -> nn.Module:
    return nn.Linear(8, int(8 * width_ratio))


def no_width(config: Any) -> nn.Module:
    return nn.Linear(8, 8)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("model_fn", "message"),
    [
        (fails, r"`model_fn` failed at width_ratio=0.25 with config=\{'lr': 1\}: KeyError: 'hidden'"),
        (no_module, "`model_fn` returned a list at width_ratio=0.25, but must return a torch.nn.Module"),
        (ignores, "`model_fn` ignores width_ratio: every parameter has the same shape"),
        (deeper, r"other parameter names at another width_ratio: \['2.bias'"),
        (grows, r"wider than the target: parameter 'weight' is \(32, 8\)"),
        (lazy, "parameter 'weight' is lazy"),
        (without_data, "'weight' of the model lies on the device 'meta'"),
        (three_widths, "parameter 'weight' changes in 3 dimensions"),
        (output_grows, r"output depends on `width_ratio`: its shape is \(4, 2\)"),
        (no_width, r"`model_fn` takes .* must take \(config, width_ratio\); .* use surrogate.shrink"),
    ],
)
def test_model_fn_errors(model_fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_surrogate(model_fn, {"lr": 1}, 1 / 4, example_input=torch.randn(4, 8))


def test_example_input_of_the_wrong_size() -> None:
    with pytest.raises(ValueError, match="surrogate cannot run on `example_input`: RuntimeError"):
        make_surrogate(mlp, {}, 1 / 4, example_input=torch.randn(4, 7))


@pytest.mark.parametrize("name", ZOO)
def test_a_plan_gives_bit_for_bit_what_none_gives(name: str) -> None:
    model_fn, config, batch = ZOO[name]
    plan = plan_surrogate(model_fn, config, 1 / 4)
    assert plan is not None
    assert pickle.loads(pickle.dumps(plan)) == plan
    states = []
    for given in (plan, None):
        torch.manual_seed(3)
        made = make_surrogate(model_fn, config, 1 / 4, example_input=batch, plan=given)
        states.append((made.state_dict(), width_plan(made), torch.rand(1)))
    assert states[0][1:] == states[1][1:]
    assert all(torch.equal(value, states[1][0][key]) for key, value in states[0][0].items())


def test_a_plan_of_other_shapes_or_another_ratio_is_refused() -> None:
    plan = plan_surrogate(mlp, {"width": 64}, 1 / 4)
    with pytest.raises(PlanMismatch, match="`plan` is of a model of other shapes"):
        make_surrogate(mlp, {"width": 128}, 1 / 4, plan=plan)
    with pytest.raises(ValueError, match=r"`width_ratio` is 0.5, but must be that of `plan`, 0.25"):
        make_surrogate(mlp, {"width": 64}, 1 / 2, plan=plan)
    with pytest.raises(ValueError, match=r"`width_ratio` is 1.0, but must be below 1"):
        plan_surrogate(mlp, {}, 1.0)
