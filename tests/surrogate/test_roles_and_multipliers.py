""" """

from __future__ import annotations

import copy
from typing import Any

import mup
import pytest
from torch import Tensor, nn

from surrogate import lr_multipliers, make_surrogate, parameter_roles, weight_decay_multipliers
from surrogate.roles_and_multipliers import width_plan
from surrogate.widths import compare_widths
from tests.surrogate.layers import StackedExperts
from tests.surrogate.models import ZOO, Config, mlp

ORACLES = {"sgd": mup.MuSGD, "adam": mup.MuAdam, "adamw": mup.MuAdamW}


def oracle_groups(name: str, optimizer: str, width_ratio: float) -> dict[str, tuple[float, float]]:
    """Parameter name -> (lr, weight_decay) that mup's optimizer gives it at lr=1, weight_decay=1."""
    model_fn, config, _ = ZOO[name]
    narrow = model_fn(config, width_ratio)
    mup.set_base_shapes(narrow, model_fn(config, 1.0), rescale_params=False, do_assert=False)
    names = {id(parameter): key for key, parameter in narrow.named_parameters()}
    oracle = ORACLES[optimizer](narrow.parameters(), lr=1.0, weight_decay=1.0)
    groups: list[dict[str, Any]] = oracle.param_groups
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


@pytest.mark.parametrize("width_ratio", [1 / 4, 1 / 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", ZOO)
def test_equal_to_mups_own_parameter_by_parameter(name: str, optimizer: str, width_ratio: float) -> None:
    model_fn, config, _ = ZOO[name]
    surrogate = make_surrogate(model_fn, config, width_ratio)
    rates = lr_multipliers(surrogate, optimizer)
    decays = weight_decay_multipliers(surrogate, optimizer)
    oracle = oracle_groups(name, optimizer, width_ratio)
    assert rates.keys() == oracle.keys() == dict(surrogate.named_parameters()).keys()
    for key, (lr, weight_decay) in oracle.items():
        assert rates[key] == pytest.approx(lr, rel=1e-12)
        assert decays[key] == pytest.approx(weight_decay, rel=1e-12)


def test_an_mlp_by_hand() -> None:
    surrogate = make_surrogate(mlp, {}, 1 / 4)
    sgd, adam = lr_multipliers(surrogate, "sgd"), lr_multipliers(surrogate, "adam")
    assert [sgd["0.weight"], sgd["2.weight"], sgd["4.weight"], sgd["4.bias"]] == [1 / 4, 1, 1 / 4, 1]
    assert [adam["0.weight"], adam["2.weight"], adam["4.weight"], adam["4.bias"]] == [1, 4, 1, 1]


def test_coupled_weight_decay_has_no_multiplier() -> None:
    surrogate = make_surrogate(mlp, {}, 1 / 4)
    assert set(weight_decay_multipliers(surrogate, "adamw", independent=False).values()) == {1.0}


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_target_has_no_multipliers(optimizer: str) -> None:
    target = make_surrogate(mlp, {}, 1.0)
    assert lr_multipliers(target, optimizer) == dict.fromkeys(dict(target.named_parameters()), 1.0)


def test_a_copy_keeps_its_multipliers() -> None:
    surrogate = make_surrogate(mlp, {}, 1 / 4)
    assert lr_multipliers(copy.deepcopy(surrogate), "adam") == lr_multipliers(surrogate, "adam")


def test_errors() -> None:
    surrogate = make_surrogate(mlp, {})
    with pytest.raises(ValueError, match=r"`optimizer` is 'lamb', .* one of .*'adam', .*'sgd'"):
        lr_multipliers(surrogate, "lamb")
    with pytest.raises(ValueError, match="Linear without a width plan, but must come from make_surrogate"):
        lr_multipliers(nn.Linear(2, 2), "sgd")


class Depthwise(nn.Module):
    """An embedding, a depthwise convolution, a scale of its own, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.depthwise = nn.Conv2d(width, width, 3, groups=width, padding=1)
        self.scale = nn.Parameter(self.patches.weight.new_ones(width, 1, 1))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((self.scale * self.depthwise(self.patches(x))).mean((2, 3)))
        return out


def test_roles_of_layers_by_what_they_read_and_write() -> None:
    mlp = parameter_roles(make_surrogate(ZOO["mlp"][0], {}, 1 / 4))
    assert mlp == {"0.weight": "embedding", "2.weight": "hidden", "4.weight": "head"}
    assert parameter_roles(make_surrogate(lambda _, ratio: Depthwise(int(32 * ratio)), {}, 1 / 4)) == {
        "patches.weight": "embedding",
        "head.weight": "head",
    }


@pytest.mark.parametrize("name", ZOO)
def test_target_and_surrogate_have_the_same_roles(name: str) -> None:
    model_fn, config, _ = ZOO[name]
    narrow, target = make_surrogate(model_fn, config, 1 / 4), model_fn(config, 1.0)
    found = parameter_roles(narrow)
    assert parameter_roles(target, compare_widths(target, narrow)) == found
    # The readout of a tied model is the embedding's weight.
    assert set(found.values()) >= ({"embedding"} if name == "tied" else {"embedding", "head"})
    assert all(narrow.get_parameter(each).dim() > 1 for each in found)


def test_a_model_without_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="without a width plan"):
        parameter_roles(nn.Linear(2, 2))


def test_a_transposed_convolution_reads_its_first_dimension() -> None:
    """mup takes its last width for the fan-in; these widths shrink by a quarter and a half."""

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        wide, least = int(64 * width_ratio), max(16, int(32 * width_ratio))
        return nn.Sequential(nn.Conv1d(3, wide, 1), nn.ConvTranspose1d(wide, least, 2), nn.Conv1d(least, 2, 1))

    narrow = make_surrogate(model_fn, {}, 1 / 4)
    assert width_plan(narrow).params["1.weight"].spread == 2.0
    assert lr_multipliers(narrow, "adam")["1.weight"] == 4.0
    assert lr_multipliers(narrow, "sgd")["1.weight"] == 1 / 2 / (1 / 4)


def test_stacked_experts_learn_as_experts_do() -> None:
    """mup takes the number of experts for the fan-out under SGD, and would multiply the rate by four."""
    stacked = make_surrogate(lambda _, ratio: StackedExperts(ratio), {}, 1 / 4)
    assert (lr_multipliers(stacked, "sgd")["up"], lr_multipliers(stacked, "adam")["up"]) == (1.0, 4.0)
