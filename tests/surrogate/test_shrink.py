""" """

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import mup
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from surrogate import PlanMismatch, ShrinkPlan, lr_multipliers, plan_shrink, shrink
from surrogate.roles_and_multipliers import width_plan
from surrogate.shrink import run_for_operators
from surrogate.widths import shapes_of
from tests.surrogate.models import ZOO, Transformer
from tests.surrogate.plain import (
    Codebook,
    Concatenated,
    Decoder,
    Experts,
    HeadDimAttention,
    Literal,
    Residual,
    SplitAttention,
    VisionTransformer,
    Windows,
    resnet18,
)

IMAGES = torch.randn(2, 3, 8, 8)
TOKENS = torch.randint(20, (2, 8))
SAME_AS_BY_HAND = ["mlp", "cnn", "conv_readout", "transformer", "tied", "two_heads", "lstm"]


@pytest.mark.parametrize("width_ratio", [1 / 2, 1 / 4])
@pytest.mark.parametrize("name", SAME_AS_BY_HAND)
def test_finds_the_sizes_that_a_width_argument_would_give(name: str, width_ratio: float) -> None:
    model_fn, config, batch = ZOO[name]
    narrow = shrink(model_fn(config, 1.0), width_ratio, batch)
    assert shapes_of(narrow) == shapes_of(model_fn(config, width_ratio))
    assert width_plan(narrow).rounded == ()


def test_resnet18() -> None:
    narrow = shrink(resnet18(), 1 / 8, IMAGES)
    assert shapes_of(narrow) == shapes_of(resnet18(8))
    assert narrow(IMAGES).shape == (2, 10)


def test_heads_become_fewer_and_keep_their_size() -> None:
    narrow = shrink(Transformer(128, 4, tied=False), 1 / 4, torch.randint(20, (2, 6)))
    attention = narrow.get_submodule("block.self_attn")
    assert isinstance(attention, nn.MultiheadAttention)
    assert (attention.num_heads, attention.head_dim, attention.embed_dim) == (1, 32, 32)
    assert width_plan(narrow).attention == {}


class OneHead(nn.Module):
    """Attention of one head, which is as wide as the model, with its scale in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.scale = 48, 48**-0.5
        self.first, self.qkv, self.readout = nn.Linear(6, 48), nn.Linear(48, 3 * 48), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).view(*x.shape[:2], 3, self.head_dim).unbind(2)
        out: Tensor = self.readout((q @ k.mT * self.scale).softmax(-1) @ v)
        return out


def test_the_only_head_becomes_smaller_and_its_logits_are_scaled() -> None:
    """By sqrt(48) / 12 (Tensor Programs V, definition 4.1, relative to the target)."""
    narrow = shrink(OneHead(), 1 / 4, torch.randn(2, 5, 6))
    assert isinstance(narrow, OneHead)
    assert narrow.head_dim == 12
    assert width_plan(narrow).attention == {"": 4.0}
    assert narrow.scale == pytest.approx(48**0.5 / 12)


@pytest.mark.parametrize("cls", [SplitAttention, HeadDimAttention])
def test_attributes_that_are_sizes_are_adapted(cls: type[SplitAttention]) -> None:
    narrow = shrink(cls(), 1 / 2, TOKENS)
    assert narrow.n_head == 2
    assert shapes_of(narrow) == shapes_of(SplitAttention(24, 2))
    assert getattr(narrow, "head_dim", 12) == 12


def test_concatenation_and_flattening() -> None:
    shapes = shapes_of(shrink(Concatenated(), 1 / 4, IMAGES))
    assert shapes["left.weight"] == (4, 3, 3, 3)
    assert shapes["right.weight"] == (6, 4, 1, 1)
    assert shapes["hidden.weight"] == (5, (4 + 6) * 64)
    assert shapes["scale"] == (5,)


def test_a_width_written_as_a_number_stays() -> None:
    shapes = shapes_of(shrink(Literal(), 1 / 4, torch.randn(2, 6)))
    assert shapes["second.weight"] == (4, 32)


def test_a_number_that_fixes_how_many_rows_there_are_stays_and_the_others_narrow() -> None:
    narrow = shrink(Decoder(), 1 / 4, torch.randn(2, 6))
    shapes = shapes_of(narrow)
    assert (shapes["encoder.weight"], shapes["spread.weight"], shapes["deconv.weight"]) == (
        (8, 6),
        (64, 2),
        (16, 6, 2, 2),
    )
    assert width_plan(narrow).rounded == ()


def test_heads_within_windows_of_a_picture_become_fewer() -> None:
    """The window divides the picture, and its index of places has as many rows: neither is a width."""
    narrow: Any = shrink(Windows(), 1 / 4, torch.randn(2, 8, 8, 3))
    assert shapes_of(narrow) == shapes_of(Windows(1 / 4))
    assert (narrow.heads, narrow.window) == (2, 4)


def test_a_codebook_in_a_buffer_is_as_wide_as_its_input() -> None:
    model = nn.Sequential(nn.Linear(6, 16), Codebook(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    narrow: Any = shrink(model, 1 / 4, torch.randn(3, 6))
    assert narrow[1].codes.shape == (4, 12)
    assert width_plan(narrow).kept == ()


class Perceptual(nn.Module):
    """Its loss compares features of a network that the forward pass does not call."""

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.factor = factor
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.interpolate(self.first(x), scale_factor=self.factor, mode="nearest")
        out: Tensor = self.last(x.relu())
        return out


@pytest.mark.filterwarnings("ignore:the narrow model saves little")
def test_a_network_that_the_forward_pass_does_not_call_stays_as_it_is() -> None:
    narrow: Any = shrink(Perceptual(), 1 / 4, IMAGES)
    assert shapes_of(narrow)["first.weight"] == (4, 3, 3, 3)
    assert shapes_of(narrow.features) == shapes_of(Perceptual().features)
    assert narrow.features(narrow(IMAGES)).shape == (2, 8, 12, 12)


def test_sizes_that_do_not_divide_are_rounded_up_and_reported() -> None:
    model = nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.Linear(100, 2))
    narrow = shrink(model, 1 / 8, torch.randn(2, 6))
    assert shapes_of(narrow)["0.weight"] == (13, 6)
    assert width_plan(narrow).rounded == ("100 -> 13 instead of 12.5 (first in 0.weight)",)
    assert width_plan(narrow).readouts["2"] == pytest.approx(100 / 13)


def test_multipliers_equal_mups() -> None:
    model = Concatenated()
    narrow = shrink(model, 1 / 4, IMAGES)
    marked = copy.deepcopy(narrow)
    mup.set_base_shapes(marked, model, rescale_params=False, do_assert=False)
    rates = {id(p): g["lr"] for g in mup.MuSGD(marked.parameters(), lr=1.0).param_groups for p in g["params"]}
    assert lr_multipliers(narrow, "sgd") == {name: rates[id(p)] for name, p in marked.named_parameters()}


def test_spread_relative_to_the_target() -> None:
    """Hidden weights: the target's / sqrt(1/4); all others: the target's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
    narrow = shrink(model, 1 / 4, torch.randn(2, 64))
    for name, expected in [("0.weight", 1.0), ("2.weight", 2.0), ("4.weight", 1.0), ("4.bias", 1.0)]:
        ratio = narrow.get_parameter(name).std().item() / model.get_parameter(name).std().item()
        assert ratio == pytest.approx(expected, rel=0.05), name


def test_the_target_stays_untouched_and_ties_hold() -> None:
    model = Transformer(64, 4, tied=True)
    before = copy.deepcopy(model.state_dict())
    narrow = shrink(model, 1 / 4, torch.randint(20, (2, 6)))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert narrow.get_submodule("readout").weight is narrow.get_submodule("embedding").weight


def test_the_same_seed_gives_the_same_surrogate_and_another_one_another() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 2))

    def weight(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return shrink(model, 1 / 4, torch.zeros(2, 6)).get_parameter("0.weight")

    assert torch.equal(weight(0), weight(0))
    assert not torch.equal(weight(0), weight(1))


def test_width_one_is_a_copy_of_the_target() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    same = shrink(model, 1.0, torch.zeros(2, 6))
    assert same is not model
    assert all(torch.equal(p, q) for p, q in zip(same.parameters(), model.parameters()))
    assert set(lr_multipliers(same, "adam").values()) == {1.0}


def test_zero_readout() -> None:
    narrow = shrink(Concatenated(), 1 / 4, IMAGES, zero_readout=True)
    assert torch.equal(narrow(IMAGES), torch.zeros(2, 10))


@pytest.mark.parametrize(("width", "heads"), [(64, 4), (64, 8), (32, 4)])
@pytest.mark.parametrize("states", [False, True])
def test_heads_keep_their_size_whatever_else_has_it(width: int, heads: int, states: bool) -> None:
    """The patches are as large as a head, or as many as heads."""
    narrow = shrink(
        VisionTransformer(width, heads, patch=width // heads, states=states), 1 / 2, torch.randn(2, 3, 16, 16)
    )
    attention: Any = narrow.get_submodule("attention")
    assert (attention.num_heads, attention.head_dim) == (heads // 2, width // heads)
    assert attention.qkv.weight.shape == (3 * width // 2, width // 2)
    assert attention.proj.weight.shape == (width // 2, width // 2)


@pytest.mark.parametrize("routed", [False, True])
def test_a_gate_keeps_a_row_for_each_expert(routed: bool) -> None:
    narrow = shrink(Experts(routed), 1 / 2, torch.randn(16, 6))
    assert narrow.get_parameter("gate.weight").shape == (4, 16)
    plan = width_plan(narrow)
    assert plan.readouts["gate"] == 2.0
    assert plan.kept == ("4 of gate.weight stays, as no layer reads it: it seems to count experts or scores",)


class Branches(nn.Module):
    """Chooses one of two layers by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(x) if x.sum() < 1 else self.other(x))
        return out


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("module", "batch", "message"),
    [
        (nn.LazyLinear(8), torch.zeros(2, 4), "parameter 'weight' of `module` is lazy"),
        ("linear", torch.zeros(2, 4), "`module` is 'linear', but must be a torch.nn.Module"),
        (nn.Linear(3, 3), torch.zeros(2, 4), "`module` cannot run on `example_input`: RuntimeError"),
        (nn.Linear(4, 8, device="meta"), torch.zeros(2, 4), "'weight' of the model lies on the device 'meta'"),
        (nn.Linear(4, 3), torch.zeros(2, 4), "no width can be scaled: every size is fixed"),
        (Branches(), torch.zeros(2, 4), "on `example_input` it does not use 'other.weight'"),
    ],
)
def test_errors(module: Any, batch: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shrink(module, 1 / 4, batch)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize(("maker", "name"), [(torch.compile, "torch.compile"), (torch.jit.script, "torch.jit")])
def test_a_compiled_module_is_refused(maker: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"module 0 comes from {name}, which hides its sizes: pass the module from"):
        shrink(nn.Sequential(maker(nn.Linear(4, 8)), nn.Linear(8, 2)), 1 / 4, torch.zeros(2, 4))


class GraphPool(nn.Module):
    """A mean for each graph of a batch, whose number is read from the data, as in PyG's global pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        assert not x.isnan().any()
        hidden, number = self.first(x), int(batch.max()) + 1
        sums = hidden.new_zeros(number, hidden.size(1)).index_add(0, batch, hidden)
        out: Tensor = self.head(sums / torch.bincount(batch, minlength=number)[:, None])
        return out


class Tagger(nn.Module):
    """The tagger of a PyTorch tutorial: half of an attribute is the recurrent layer's size; tags index a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_dim = 32
        self.embedding = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, self.hidden_dim // 2, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(self.hidden_dim, 5)
        self.transitions, self.start = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5))

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        state = torch.zeros(2, len(words), self.hidden_dim // 2)
        scores = self.tags(self.lstm(self.embedding(words), (state, state))[0]) + self.start
        right = self.transitions[tags[:, :-1], tags[:, 1:]] + scores.gather(2, tags[..., None])[:, 1:, 0]
        out: Tensor = right - (scores[:, :-1, :, None] + self.transitions + scores[:, 1:, None]).logsumexp((2, 3))
        return out


class AveragedHeads(nn.Module):
    """Graph attention whose heads are averaged: the size of a head is the width of the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out_channels = 4, 16
        self.inner, self.attention = nn.Linear(6, 4 * 16), nn.Parameter(torch.randn(1, 4, 16))
        self.bias, self.head = nn.Parameter(torch.zeros(16)), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).view(-1, self.heads, self.out_channels)
        out: Tensor = self.head((parts * (parts * self.attention).sum(-1, keepdim=True)).mean(1) + self.bias)
        return out


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: two of its weights share the number of modes."""

    def __init__(self) -> None:
        super().__init__()
        self.modes, self.first, self.head = 3, nn.Linear(2, 16), nn.Linear(16, 1)
        self.low, self.high = (nn.Parameter(torch.rand(16, 16, 3, 3, dtype=torch.cfloat)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        waves, m = torch.fft.rfft2(self.first(x).permute(0, 3, 1, 2)), self.modes
        out = torch.zeros_like(waves)
        out[..., :m, :m] = torch.einsum("bixy,ioxy->boxy", waves[..., :m, :m], self.low)
        out[..., -m:, :m] = torch.einsum("bixy,ioxy->boxy", waves[..., -m:, :m], self.high)
        values: Tensor = self.head(torch.fft.irfft2(out, s=x.shape[1:3]).permute(0, 2, 3, 1))
        return values


class Masked(nn.Module):
    """Shift and scale of an autoregressive flow: the last size is fixed, as its halves are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 12))

    def forward(self, x: Tensor) -> Tensor:
        shift, scale = self.net(x).chunk(2, 1)
        out: Tensor = (x - shift) * scale.exp()
        return out


class Gate(nn.Module):
    """A bottleneck of four units, as in squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 32), nn.Linear(32, 2)
        self.down, self.up = nn.Linear(32, 4), nn.Linear(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.head(hidden * self.up(self.down(hidden)).sigmoid())
        return out


class RelativeBias(nn.Module):
    """Attention by hand with a bias for each head, as in T5, of which one is left."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.head_dim = 4, 8
        self.first, self.qkv, self.head = nn.Linear(6, 32), nn.Linear(32, 96), nn.Linear(32, 2)
        self.bias = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for part in parts)
        bias = self.bias(steps[:, None] - steps + len(steps) - 1).permute(2, 0, 1)
        out: Tensor = self.head(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class SparseGraph(nn.Module):
    """A graph convolution by a sparse matrix, rolled by the place of the largest value, as in Autoformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        hidden = torch.sparse.mm(matrix, self.first(x))
        place = hidden.mean(1).topk(2).indices
        out: Tensor = self.head(hidden.roll(-int(place[0]), 0) * hidden[place[1]])
        return out


PAIRS = torch.zeros(3, 7, dtype=torch.long)


@pytest.mark.parametrize(
    ("module", "batch", "name", "shape", "kept"),
    [
        (GraphPool(), (torch.randn(5, 4), torch.tensor([0, 0, 1, 2, 2])), "head.weight", (2, 4), ""),
        (Tagger(), (PAIRS, PAIRS + 4), "lstm.weight_hh_l0", (16, 4), "5 of transitions stays"),
        (AveragedHeads(), torch.randn(3, 6), "inner.weight", (16, 6), ""),
        (Spectral(), torch.randn(2, 8, 8, 2), "low", (4, 4, 3, 3), "3 of high stays, as muP has rules for two widths"),
        (Masked(), torch.randn(3, 6), "net.2.weight", (12, 5), ""),
        (RelativeBias(), torch.randn(3, 5, 6), "bias.weight", (9, 1), ""),
        (SparseGraph(), (torch.randn(5, 4), torch.eye(5).to_sparse()), "head.weight", (2, 4), ""),
        (Gate(), torch.randn(3, 4), "down.weight", (4, 8), "4 of down.weight stays, as one unit would be left"),
    ],
)
def test_models_of_sequences_graphs_and_physics(
    module: nn.Module, batch: Any, name: str, shape: tuple[int, ...], kept: str
) -> None:
    narrow = shrink(module, 1 / 4, batch)
    assert tuple(narrow.get_parameter(name).shape) == shape
    assert kept in width_plan(narrow).summary
    assert not width_plan(narrow).rounded


def test_rounding_that_undoes_the_ratio() -> None:
    with pytest.raises(ValueError, match=r"`width_ratio` is 0.9, which leaves every size of `module` as it is"):
        shrink(SplitAttention(24, 2), 0.9, TOKENS)  # 1.8 heads are 2


INITIALIZERS: dict[str, Callable[[Tensor], Any]] = {
    "normal": lambda w: nn.init.normal_(w, std=0.02),
    "xavier": nn.init.xavier_uniform_,
    "fan_in": nn.init.kaiming_normal_,
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "orthogonal": nn.init.orthogonal_,
    "one over width": lambda w: nn.init.normal_(w, std=1 / w.shape[1]),
}


@pytest.mark.parametrize("name", INITIALIZERS)
def test_each_initializer_keeps_the_targets_scale(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 256), nn.Linear(256, 256), nn.Linear(256, 12))
    for layer in model.children():
        INITIALIZERS[name](layer.weight)  # type: ignore[arg-type]
    narrow = shrink(model, 1 / 4, torch.randn(2, 12))
    for key, spread in [("0.weight", 1.0), ("1.weight", 2.0), ("2.weight", 1.0)]:
        size = narrow.get_parameter(key).std().item() / model.get_parameter(key).std().item()
        assert size == pytest.approx(spread, rel=0.1), key


@pytest.mark.parametrize("initialize", [lambda w: nn.init.constant_(w, 0.3), nn.init.zeros_, nn.init.eye_])
def test_weights_that_are_not_random_are_left_alone(initialize: Callable[[Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    hidden = model.get_parameter("1.weight")
    initialize(hidden)
    narrow = shrink(model, 1 / 4, torch.randn(2, 6))
    assert torch.equal(narrow.get_parameter("1.weight"), hidden[:16, :16])


def residual() -> nn.Module:
    stem = nn.Conv2d(3, 16, 3, padding=1)
    return nn.Sequential(stem, Residual(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


Made = tuple[Callable[[], nn.Module], Tensor]
NAMES = ["mlp", "cnn", "conv_readout", "tied", "two_heads"]
MODELS: dict[str, Made] = {name: (partial(ZOO[name][0], ZOO[name][1], 1.0), ZOO[name][2]) for name in NAMES}
MODELS |= {
    "residual": (residual, IMAGES),
    "concatenated": (Concatenated, IMAGES),
    "split attention": (SplitAttention, TOKENS),
    "head_dim": (HeadDimAttention, TOKENS),
    "literal": (Literal, torch.randn(2, 6)),
}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 4}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=1, **sizes))
    return model


MODELS["gpt2"] = gpt2, TOKENS


def shrunk(module: nn.Module, batch: Tensor, plan: ShrinkPlan | None = None) -> nn.Module:
    torch.manual_seed(3)
    return shrink(module, 1 / 2, batch, plan=plan)


@pytest.mark.parametrize("name", MODELS)
def test_another_modules_plan_gives_bit_for_bit_what_none_gives(name: str) -> None:
    make, batch = MODELS[name]
    plan, module = plan_shrink(make(), 1 / 2, batch), make()
    planned, alone = shrunk(module, batch, plan), shrunk(module, batch)
    assert width_plan(planned) == width_plan(alone)
    assert list(planned.state_dict()) == list(alone.state_dict())
    for key, value in alone.state_dict().items():
        assert torch.equal(planned.state_dict()[key], value), key
    assert repr(planned) == repr(alone)


def test_random_numbers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    before = torch.get_rng_state()
    plan_shrink(model, 1 / 4, torch.zeros(2, 6))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plan_is_plain_values() -> None:
    plan = plan_shrink(SplitAttention(), 1 / 2, TOKENS)
    assert copy.deepcopy(plan) == plan == pickle.loads(pickle.dumps(plan))


class Block(nn.Module):
    """Each of its settings leaves the shapes of all weights as they are."""

    def __init__(self, *, stride: int = 1, causal: bool = True, heads: int = 4, skip: float = 0.0) -> None:
        super().__init__()
        self.stride, self.causal, self.heads, self.skip = stride, causal, heads, skip
        self.first = nn.Conv1d(8, 64, 3, stride, 1)
        self.qkv = nn.Linear(64, 192)
        self.drop = nn.Dropout(skip / 10)
        self.readout = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.first(x).transpose(1, 2))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        out: Tensor = self.readout(mixed + hidden if self.skip > 0.5 else mixed).mean(1)
        return out


SERIES = torch.randn(2, 8, 6)


@pytest.mark.parametrize("settings", [{"stride": 2}, {"causal": False}, {"heads": 8}, {"heads": 2}, {"skip": 0.9}])
def test_a_plan_of_another_structure_is_refused(settings: dict[str, float]) -> None:
    plan = plan_shrink(Block(), 1 / 2, SERIES)
    with pytest.raises(PlanMismatch, match="`plan` is of a module"):
        shrink(Block(**settings), 1 / 2, SERIES, plan=plan)  # type: ignore[arg-type]


def test_floats_that_choose_no_branch_share_a_plan() -> None:
    shrink(Block(skip=0.2), 1 / 2, SERIES, plan=plan_shrink(Block(skip=0.1), 1 / 2, SERIES))


def test_other_sizes_are_refused() -> None:
    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))

    batch = torch.zeros(2, 6)
    with pytest.raises(PlanMismatch, match="of other sizes"):
        shrink(mlp(32), 1 / 2, batch, plan=plan_shrink(mlp(64), 1 / 2, batch))


def test_a_model_that_computes_something_else_each_time_is_shrunk_without_a_plan() -> None:
    calls = [0]

    class Deeper(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            calls[0] += 1
            for _ in calls * calls[0]:
                x = x.relu()
            out: Tensor = super().forward(x)
            return out

    model, batch = Deeper(nn.Linear(6, 64), nn.Linear(64, 2)), torch.zeros(2, 6)
    plan = plan_shrink(model, 1 / 2, batch)
    with pytest.raises(PlanMismatch, match="computes something else"):
        shrink(model, 1 / 2, batch, plan=plan)
    assert shrink(model, 1 / 2, batch).get_parameter("0.weight").shape == (32, 6)


def test_bad_ratios() -> None:
    model, batch = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 2)), torch.zeros(2, 6)
    with pytest.raises(ValueError, match=r"`width_ratio` is 1.0, but must be below 1"):
        plan_shrink(model, 1.0, batch)
    plan = plan_shrink(model, 1 / 2, batch)
    with pytest.raises(ValueError, match=r"`width_ratio` is 0.25, but must be that of `plan`, 0.5"):
        shrink(model, 1 / 4, batch, plan=plan)


def test_hooks_on_parameters_are_refused() -> None:
    module = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    module[2].get_parameter("weight").register_hook(lambda grad: grad * 0.1)
    with pytest.raises(ValueError, match=r"parameter '2\.weight' of `module` has a hook"):
        shrink(module, 1 / 2, torch.randn(2, 6))


FOUR_CHANNELS = torch.randn(2, 4, 8, 8)


def operators(module: nn.Module, batch: Tensor = FOUR_CHANNELS) -> str:
    return run_for_operators(module, batch)[1]


@pytest.mark.parametrize("name", ZOO)
def test_models_that_differ_in_weights_alone_compute_the_same(name: str) -> None:
    model_fn, config, batch = ZOO[name]
    first, second = (run_for_operators(model_fn(config, 1 / 4), batch) for _ in range(2))
    assert first == second
    assert first[1] != operators(model_fn(config, 1 / 2), batch)


class Branch(nn.Module):
    def __init__(self, skip: float) -> None:
        super().__init__()
        self.skip = skip
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out + x if self.skip > 0.5 else out


SUBTLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "stride": (lambda: nn.Conv2d(4, 4, 3, 1, 1), lambda: nn.Conv2d(4, 4, 3, 2, 1)),
    "groups of a norm": (lambda: nn.GroupNorm(2, 4), lambda: nn.GroupNorm(4, 4)),
    "a flag": (lambda: nn.AvgPool2d(3, padding=1), lambda: nn.AvgPool2d(3, padding=1, count_include_pad=False)),
    "a branch that a float takes": (lambda: Branch(0.1), lambda: Branch(0.9)),
    "an activation": (nn.ReLU, nn.GELU),
    "a type": (nn.ReLU, lambda: nn.Sequential(nn.ReLU(), nn.ReLU())),
}


@pytest.mark.parametrize("name", SUBTLE)
def test_subtle_differences_count(name: str) -> None:
    first, second = (make() for make in SUBTLE[name])
    assert operators(first) != operators(second)


def test_floats_that_choose_no_branch_do_not() -> None:
    assert operators(nn.Dropout(0.1)) == operators(nn.Dropout(0.2))
    assert operators(Branch(0.1)) == operators(Branch(0.2))


def test_the_module_and_the_global_generator_stay_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Dropout(0.5))
    before = torch.get_rng_state()
    shapes, _ = run_for_operators(model, FOUR_CHANNELS)
    assert shapes == {"output": (2, 4, 8, 8)}
    assert torch.equal(model.get_buffer("0.running_mean"), torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), before)
