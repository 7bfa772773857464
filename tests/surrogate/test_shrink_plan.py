from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from surrogate import PlanMismatch, ShrinkPlan, plan_shrink, shrink
from surrogate.multipliers import width_plan
from surrogate.shrink_plan import run_for_operators
from tests.surrogate.models import ZOO
from tests.surrogate.plain import Concatenated, HeadDimAttention, Literal, Residual, SplitAttention

IMAGES = torch.randn(2, 3, 8, 8)
TOKENS = torch.randint(20, (2, 8))


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
