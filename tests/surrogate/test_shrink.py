from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mup
import pytest
import torch
from torch import Tensor, nn

from surrogate import lr_multipliers, shrink
from surrogate.multipliers import width_plan
from surrogate.widths import shapes_of
from tests.surrogate.models import ZOO, Transformer
from tests.surrogate.plain import (
    Concatenated,
    Experts,
    HeadDimAttention,
    Literal,
    SplitAttention,
    VisionTransformer,
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
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out if out.sum() > 0 else -out


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("module", "batch", "message"),
    [
        (nn.LazyLinear(8), torch.zeros(2, 4), "parameter 'weight' of `module` is lazy"),
        ("linear", torch.zeros(2, 4), "`module` is 'linear', but must be a torch.nn.Module"),
        (nn.Linear(3, 3), torch.zeros(2, 4), "`module` cannot run on `example_input`: RuntimeError"),
        (nn.Linear(4, 3), torch.zeros(2, 4), "no width can be scaled: every size is fixed"),
        (Branches(), torch.zeros(2, 4), "module 'Branches' cannot be followed on symbolic sizes"),
    ],
)
def test_errors(module: Any, batch: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shrink(module, 1 / 4, batch)


def test_rounding_that_undoes_the_ratio() -> None:
    with pytest.raises(ValueError, match=r"`width_ratio` is 0.9, which leaves every size of `module` as it is"):
        shrink(SplitAttention(24, 2), 0.9, TOKENS)  # 1.8 heads are 2


def test_ratio_outside_its_range() -> None:
    with pytest.raises(ValueError, match=r"`width_ratio` is 2, but must be a number in \(0, 1\]"):
        shrink(nn.Linear(4, 3), 2, torch.zeros(2, 4))


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
