from __future__ import annotations

from typing import Any

import mup
import pytest
import torch
from torch import nn

from surrogate import make_surrogate
from tests.surrogate.models import ZOO, mlp, transformer


def mup_mlp(width_ratio: float) -> nn.Module:
    """tests.surrogate.models.mlp with mup's own readout."""
    model = mlp({}, width_ratio)
    assert isinstance(model, nn.Sequential)
    model[-1] = mup.MuReadout(int(128 * width_ratio), 10)
    return model


def test_equal_to_mups_own_initial_weights_and_outputs() -> None:
    torch.manual_seed(0)
    ours = make_surrogate(mlp, {}, 1 / 4)
    torch.manual_seed(0)
    theirs = mup_mlp(1 / 4)
    theirs[-1].load_state_dict(mlp_readout_of_seed_0())  # type: ignore[index]
    mup.set_base_shapes(theirs, mup_mlp(1.0))
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(own, other, msg=name)
    x = torch.randn(3, 64)
    torch.testing.assert_close(ours(x), theirs(x))


def mlp_readout_of_seed_0() -> dict[str, Any]:
    torch.manual_seed(0)
    model = mlp({}, 1 / 4)
    assert isinstance(model, nn.Sequential)
    state: dict[str, Any] = model[-1].state_dict()
    return state


def constant_scale(config: dict[str, Any], width_ratio: float) -> nn.Module:
    """Every weight starts at a standard deviation of 0.02, as in GPT-2 and BERT."""
    model = mlp(config, width_ratio)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
    return model


def fan_out_scale(config: dict[str, Any], width_ratio: float) -> nn.Module:
    """Kaiming's fan-out rule, as in ResNet: even the input layer's spread depends on the width."""
    model = mlp(config, width_ratio)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return model


@pytest.mark.parametrize("model_fn", [mlp, constant_scale, fan_out_scale])
def test_spread_relative_to_the_target(model_fn: Any) -> None:
    """Hidden weights: the target's / sqrt(1/4); all others: the target's."""
    torch.manual_seed(0)
    config, ratio = {"width": 1024}, 1 / 4
    narrow = dict(make_surrogate(model_fn, config, ratio).named_parameters())
    wide = dict(model_fn(config, 1.0).named_parameters())
    for name, expected in [("0.weight", 1.0), ("2.weight", 2.0), ("4.weight", 1.0)]:
        if model_fn is fan_out_scale and name == "4.weight":
            continue  # its fan-out is finite: checked by the input weight, whose fan-out is the width
        assert narrow[name].std().item() / wide[name].std().item() == pytest.approx(expected, rel=0.05), name


def test_norms_and_zeros_are_left_alone() -> None:
    narrow = make_surrogate(constant_scale, {}, 1 / 4)
    assert torch.equal(narrow.get_parameter("3.weight"), torch.ones(32))
    assert torch.equal(narrow.get_parameter("2.bias"), torch.zeros(32))


def test_zero_readout_starts_at_the_same_function_at_every_width() -> None:
    for name in ("mlp", "cnn", "transformer", "two_heads"):
        model_fn, config, batch = ZOO[name]
        output = make_surrogate(model_fn, config, 1 / 4, zero_readout=True)(batch)
        for value in output.values() if isinstance(output, dict) else [output]:
            assert torch.equal(value, torch.zeros_like(value))


def test_zero_readout_leaves_a_tied_embedding() -> None:
    narrow = make_surrogate(transformer, {"tied": True}, 1 / 4, zero_readout=True)
    assert narrow.get_parameter("embedding.weight").std().item() == pytest.approx(1.0, rel=0.1)
