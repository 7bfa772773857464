""" """

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from surrogate import make_surrogate, parameter_roles, shrink
from surrogate.forward_multipliers import ScaleInput, find_logit_scales, find_readouts, head_sizes, scale_logits
from surrogate.roles_and_multipliers import width_plan
from surrogate.widths import compare_widths
from tests.surrogate.models import ZOO, Config, narrow_heads, transformer


def test_head_size_kept_means_no_logit_scale() -> None:
    assert width_plan(make_surrogate(transformer, {}, 1 / 4)).attention == {}


def test_head_size_shrunk_scales_logits_by_root_of_the_ratio() -> None:
    plan = width_plan(make_surrogate(narrow_heads, {}, 1 / 4))
    assert plan.attention == {"block.self_attn": math.sqrt(32 / 8)}


@pytest.mark.parametrize("by_name", [False, True])
def test_multihead_attention_with_target_head_16_and_own_head_4(by_name: bool) -> None:
    """Logits are q.k sqrt(D) / d with D = 16, d = 4 (Tensor Programs V, definition 4.1 relative to D), biases too."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)  # heads of 4
    nn.init.normal_(layer.in_proj_bias)
    x = torch.randn(3, 5, 8)
    scale_logits(layer, find_logit_scales(layer, {"": 16}), {"": 16})
    ours = layer(query=x, key=x, value=x)[0] if by_name else layer(x, x, x)[0]
    projected = (x @ layer.in_proj_weight.T + layer.in_proj_bias).chunk(3, dim=-1)
    q, k, v = (part.view(3, 5, 2, 4).transpose(1, 2) for part in projected)
    mixed = scaled_dot_product_attention(q, k, v, scale=math.sqrt(16) / 4)
    torch.testing.assert_close(ours, layer.out_proj(mixed.transpose(1, 2).reshape(3, 5, 8)))


class Encoder(nn.Module):
    """torch's encoder over sequences of unequal lengths, with as many heads at any width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, width, dropout=0.0, batch_first=True)
        self.first, self.blocks, self.head = nn.Linear(4, width), nn.TransformerEncoder(layer, 1), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.tensor([[False, False, False], [False, False, True]])
        out: Tensor = self.head(self.blocks(self.first(x), src_key_padding_mask=padding)[:, 0])
        return out


def test_an_encoder_whose_logits_are_scaled_is_evaluated_on_padded_sequences() -> None:
    """torch's attention refuses the packed sequences of its encoder if its key is another tensor than its query."""
    narrow = make_surrogate(lambda config, ratio: Encoder(int(32 * ratio)), {}, 1 / 4)
    assert width_plan(narrow).attention == {"blocks.layers.0.self_attn": 2.0}
    x = torch.randn(2, 3, 4)
    trained = narrow(x)
    with torch.no_grad():
        torch.testing.assert_close(narrow.eval()(x), trained.detach())


class OwnAttention(nn.Module):
    def __init__(self, scaled_for: int) -> None:
        super().__init__()
        self.head_dim = 4
        self.scaling = scaled_for**-0.5


@pytest.mark.parametrize("scaled_for", [4, 16])
def test_an_attention_that_keeps_its_scale_in_an_attribute(scaled_for: int) -> None:
    """The constructor ran at the layer's own head size, or at the target's if the layer is a copy."""
    layer = OwnAttention(scaled_for)
    assert head_sizes(layer) == {"": 4}
    scale_logits(layer, find_logit_scales(layer, {"": 16}), {"": 16})
    assert layer.scaling == pytest.approx(math.sqrt(16) / 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp", {"4": 4.0}),
        ("cnn", {"8": 4.0}),
        ("conv_readout", {"2": 4.0}),
        ("transformer", {"readout": 4.0}),
        ("tied", {"readout": 4.0}),
        ("two_heads", {"classes": 4.0, "box": 4.0}),
        ("lstm", {"readout": 4.0}),
    ],
)
def test_readouts_by_shape(name: str, expected: dict[str, float]) -> None:
    model_fn, config, _ = ZOO[name]
    narrow, wide = model_fn(config, 1 / 4), model_fn(config, 1.0)
    assert find_readouts(narrow, compare_widths(wide, narrow)) == expected


def test_readout_input_is_multiplied_and_its_bias_is_not() -> None:
    model_fn, config, x = ZOO["mlp"]
    narrow = make_surrogate(model_fn, config, 1 / 4)
    assert isinstance(narrow, nn.Sequential)
    hidden = narrow[:-1](x)
    expected = 4.0 * hidden @ narrow.get_parameter("4.weight").T + narrow.get_parameter("4.bias")
    torch.testing.assert_close(narrow(x), expected)


def test_hooks_compare_by_value_and_pickle() -> None:
    assert ScaleInput(4.0) == ScaleInput(4.0) != ScaleInput(2.0)
    assert pickle.loads(pickle.dumps(ScaleInput(4.0))) == ScaleInput(4.0)


def test_a_readout_called_by_keyword() -> None:
    layer = nn.Linear(4, 2)
    layer.register_forward_pre_hook(ScaleInput(2.0))
    with pytest.raises(ValueError, match=r"a readout .* first positional argument"):
        layer(input=torch.zeros(1, 4))


def upsampling(config: Config, width_ratio: float) -> nn.Module:
    """Transposed convolutions in as many groups as channels, in groups of four channels, and as the last layer."""
    width = int(64 * width_ratio)
    return nn.Sequential(
        nn.Conv2d(3, width, 1),
        nn.ConvTranspose2d(width, width, 2, stride=2, groups=width),
        nn.ConvTranspose2d(width, width, 2, stride=2, groups=width // 4),
        nn.ConvTranspose2d(width, 2, 1, groups=2),
    )


def test_a_grouped_transposed_convolution_between_widths_is_no_readout() -> None:
    narrow = make_surrogate(upsampling, {}, 1 / 4)
    assert width_plan(narrow).readouts == {"3": 4.0}
    assert parameter_roles(narrow) == {"0.weight": "embedding", "3.weight": "head"}


@pytest.mark.parametrize(
    ("norm", "spectral"), [(weight_norm, {}), (spectral_norm, {"0": 0.5}), (orthogonal, {"0": 0.5})]
)
def test_a_norm_that_a_parametrization_fixes(
    norm: Callable[[nn.Module], nn.Module], spectral: dict[str, float]
) -> None:
    """A readout of fixed norm has elements that are larger by the root of the width ratio's inverse: it gets the rest.

    A spectral norm of 1 is too large for a narrow layer that reads an input: muP asks for the root of its outputs.
    """

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        width = int(64 * width_ratio)
        return nn.Sequential(norm(nn.Linear(8, width)), norm(nn.Linear(width, width)), norm(nn.Linear(width, 3)))

    built = [make_surrogate(model_fn, {}, 1 / 4)]
    if norm is not orthogonal:  # its factorizations do not run on symbolic sizes
        built.append(shrink(model_fn({}, 1.0), 1 / 4, torch.zeros(2, 8)))
    for narrow in built:
        assert (width_plan(narrow).readouts, width_plan(narrow).spectral) == ({"2": 2.0}, spectral)
        assert {*parameter_roles(narrow).values()} == {"embedding", "hidden", "head"}


def test_norms_of_columns_do_not_fix_the_size_of_a_readouts_elements() -> None:
    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        width = int(64 * width_ratio)
        return nn.Sequential(nn.Linear(8, width), weight_norm(nn.Linear(width, 3), dim=1))

    assert width_plan(make_surrogate(model_fn, {}, 1 / 4)).readouts == {"1": 4.0}
