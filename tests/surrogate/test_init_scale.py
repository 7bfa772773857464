from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mup
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from surrogate import make_surrogate
from surrogate.init_scale import _MOST_BUILDS, _measure
from tests.surrogate.models import ZOO, Config, mlp, transformer


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


class Odd(nn.Module):
    """Has a table of indices, and a parameter without elements whose law cannot be read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)
        self.table = nn.Parameter(torch.randint(0, 5, (width, width)), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0) / torch.randn(3).norm())


def test_parameters_of_integers_or_without_elements_stay() -> None:
    surrogate = make_surrogate(lambda config, ratio: Odd(round(64 * ratio)), {}, 1 / 4)
    assert surrogate.get_parameter("table").unique().tolist() == [0, 1, 2, 3, 4]
    assert surrogate.get_parameter("none").numel() == 0


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
        assert narrow[name].std().item() / wide[name].std().item() == pytest.approx(expected, rel=0.05), name


def initialized(initialize: Callable[[Tensor], Any]) -> Callable[[Any, float], nn.Module]:
    """An MLP of three layers whose weights are drawn by `initialize`."""

    def model_fn(config: Any, width_ratio: float) -> nn.Module:
        width = int(config["width"] * width_ratio)
        model = nn.Sequential(nn.Linear(12, width), nn.Linear(width, width), nn.Linear(width, 5))
        for index in range(3):
            initialize(model.get_parameter(f"{index}.weight"))
        return model

    return model_fn


def both_fans(width: int, finite: int) -> float:
    return float((width + finite) ** -0.5)


def width_scale(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.7 / weight.shape[1] ** 0.5 * 2)


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[int], tuple[float, float, float]]]] = {
    "normal": (lambda w: nn.init.normal_(w, std=0.02), lambda n: (1, 1, 1)),
    "trunc_normal": (lambda w: nn.init.trunc_normal_(w, std=0.02), lambda n: (1, 1, 1)),
    "xavier_uniform": (nn.init.xavier_uniform_, lambda n: (both_fans(n, 12), both_fans(n, n), both_fans(n, 5))),
    "xavier_normal": (nn.init.xavier_normal_, lambda n: (both_fans(n, 12), both_fans(n, n), both_fans(n, 5))),
    "fan_in": (nn.init.kaiming_normal_, lambda n: (1, n**-0.5, n**-0.5)),
    "fan_out": (lambda w: nn.init.kaiming_uniform_(w, mode="fan_out"), lambda n: (n**-0.5, n**-0.5, 1)),
    "orthogonal": (nn.init.orthogonal_, lambda n: (max(n, 12) ** -0.5, n**-0.5, max(n, 5) ** -0.5)),
    "one over width": (lambda w: nn.init.normal_(w, std=1 / w.shape[1]), lambda n: (1, 1 / n, 1 / n)),
    "custom": (width_scale, lambda n: (1, n**-0.5, n**-0.5)),
}
"""Initializer, and up to a factor the standard deviation of the three layers at a width."""


@pytest.mark.parametrize("width_ratio", [1 / 8, 1 / 2])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("name", FORMS)
def test_each_weight_gets_the_targets_scale_exactly(name: str, width: int, width_ratio: float) -> None:
    """It is the model's own draw, times what the closed forms ask for; at any seed."""
    initialize, scales = FORMS[name]
    model_fn, narrow = initialized(initialize), int(width * width_ratio)
    torch.manual_seed(5)
    ours = make_surrogate(model_fn, {"width": width}, width_ratio)
    torch.manual_seed(5)
    plain = model_fn({"width": width}, width_ratio)
    for layer, full, own in zip(range(3), scales(width), scales(narrow)):
        expected = full / own * (width_ratio**-0.5 if layer == 1 else 1.0)
        weight = plain.get_parameter(f"{layer}.weight")
        torch.testing.assert_close(ours.get_parameter(f"{layer}.weight"), weight * expected, rtol=1e-3, atol=0.0)


MUP = {
    "normal": (lambda w: nn.init.normal_(w, std=0.02), lambda w: mup.init.normal_(w, std=0.02)),
    "uniform": (lambda w: nn.init.uniform_(w, -0.1, 0.1), lambda w: mup.init.uniform_(w, -0.1, 0.1)),
    "xavier_uniform": (nn.init.xavier_uniform_, mup.init.xavier_uniform_),
    "xavier_normal": (nn.init.xavier_normal_, mup.init.xavier_normal_),
    "kaiming_normal": (nn.init.kaiming_normal_, mup.init.kaiming_normal_),
}


@pytest.mark.parametrize("name", MUP)
def test_equal_to_mups_own_initializers(name: str) -> None:
    initialize, oracle = MUP[name]
    model_fn, config = initialized(initialize), {"width": 64}
    torch.manual_seed(0)
    ours = make_surrogate(model_fn, config, 1 / 4)
    theirs: Any = model_fn(config, 1 / 4)
    mup.set_base_shapes(theirs, model_fn(config, 1.0), rescale_params=False, do_assert=False)
    torch.manual_seed(0)
    for width in [(12, 16), (16, 16), (16, 5)]:
        nn.Linear(*width)  # what the constructor draws before
    for layer in theirs:
        oracle(layer.weight)
    for layer, other in enumerate(theirs):
        torch.testing.assert_close(ours.get_parameter(f"{layer}.weight"), other.weight, rtol=1e-4, atol=0.0)


def test_no_seed_gives_a_wrong_scale() -> None:
    """Eight units of 64: the noise of a draw is 9 %; a wrong law would be off by 2.8."""
    model_fn = initialized(lambda w: nn.init.normal_(w, std=0.02))
    drawn = []
    for seed in range(100):
        torch.manual_seed(seed)
        drawn.append(make_surrogate(model_fn, {"width": 64}, 1 / 8).get_parameter("1.weight").detach())
    scales = torch.stack(drawn).square().mean(dim=(1, 2)).sqrt() / (0.02 * 8**0.5)
    assert scales.min() > 0.6
    assert scales.max() < 1.5
    assert scales.square().mean().sqrt().item() == pytest.approx(1.0, rel=0.02)


def from_data(weight: Tensor) -> None:
    """A law that only the values tell: each draw divided by its own norm."""
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape))
        weight.div_(weight.norm())


def test_a_law_that_cannot_be_read_is_measured() -> None:
    torch.manual_seed(0)
    ours = make_surrogate(initialized(from_data), {"width": 64}, 1 / 8)
    for layer, elements, spread in [(0, 12 * 64, 1.0), (1, 64 * 64, 8**0.5), (2, 5 * 64, 1.0)]:
        size = ours.get_parameter(f"{layer}.weight").square().mean().sqrt().item()
        assert size == pytest.approx(elements**-0.5 * spread, rel=0.01)


def test_more_models_are_built_where_the_smallest_parameter_has_few_values() -> None:
    built = list[nn.Module]()

    def build() -> nn.Module:
        built.append(nn.Linear(4096, 2))
        return built[-1]

    _measure(build, ["weight"])
    assert len(built) == 2  # as many as show whether it is random
    _measure(build, ["weight", "bias"])
    assert len(built) == 2 + _MOST_BUILDS


def test_embeddings_biases_and_residual_projections_of_gpt2() -> None:
    import transformers

    def gpt2(config: Any, width_ratio: float) -> nn.Module:
        heads = int(4 * width_ratio)
        sizes = {"vocab_size": 100, "n_positions": 32, "n_embd": 16 * heads, "n_layer": 2, "n_head": heads}
        model: nn.Module = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(bos_token_id=0, eos_token_id=1, **sizes)
        )
        return model

    torch.manual_seed(0)
    ours = make_surrogate(gpt2, {}, 1 / 4)
    for name, std in [("wte", 0.02), ("wpe", 0.02), ("h.0.attn.c_attn", 0.04), ("h.0.mlp.c_proj", 0.04 / 2)]:
        size = ours.get_parameter(f"transformer.{name}.weight").std().item()
        assert size == pytest.approx(std, rel=0.1), name
    assert not ours.get_parameter("transformer.h.0.attn.c_attn.bias").any()


@pytest.mark.parametrize("initialize", [lambda w: nn.init.constant_(w, 0.3), nn.init.zeros_, nn.init.eye_])
def test_hidden_weights_that_are_not_random_are_left_alone(initialize: Callable[[Tensor], Any]) -> None:
    model_fn = initialized(initialize)
    ours, plain = make_surrogate(model_fn, {"width": 64}, 1 / 8), model_fn({"width": 64}, 1 / 8)
    assert torch.equal(ours.get_parameter("1.weight"), plain.get_parameter("1.weight"))


def test_a_constant_that_depends_on_the_width_is_the_targets_outside_of_hidden_weights() -> None:
    ours = make_surrogate(initialized(lambda w: nn.init.constant_(w, 1 / w.shape[1])), {"width": 64}, 1 / 8)
    torch.testing.assert_close(ours.get_parameter("2.weight"), torch.full((5, 8), 1 / 64))


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


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_zero_readout_of_a_fixed_norm(norm: Callable[[nn.Module], nn.Module]) -> None:
    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        return nn.Sequential(nn.Linear(8, int(64 * width_ratio)), norm(nn.Linear(int(64 * width_ratio), 3)))

    if norm is spectral_norm:
        with pytest.raises(ValueError, match=r"`zero_readout` is True, but the weight of '1' has a norm of 1"):
            make_surrogate(model_fn, {}, 1 / 4, zero_readout=True)
    else:
        assert not make_surrogate(model_fn, {}, 1 / 4, zero_readout=True)(torch.ones(2, 8)).any()


def test_zero_readout_leaves_a_tied_embedding() -> None:
    narrow = make_surrogate(transformer, {"tied": True}, 1 / 4, zero_readout=True)
    assert narrow.get_parameter("embedding.weight").std().item() == pytest.approx(1.0, rel=0.1)
