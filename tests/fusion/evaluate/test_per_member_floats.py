"""Floats in modules that differ between members: each member computes with its own."""

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import fuse
from tests.fusion.training import assert_same_gradients, assert_same_states

ROWS, IMAGES = torch.randn(6, 4), torch.randn(6, 4, 5, 5)
SEQUENCES = torch.randn(6, 5, 4)
VALUES = [0.05, 0.1, 0.7]


class With(nn.Module):
    """A module that computes `function(self.layer(x), self.value)`."""

    def __init__(self, value: float, function: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.layer, self.value, self.function = nn.Linear(4, 4), value, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), self.value)


def branch(x: Tensor, value: float) -> Tensor:
    return x * value if value > 0.0 else x


def computed(x: Tensor, value: float) -> Tensor:
    """As the stochastic depth of timm does: it decides by numbers computed from the setting."""
    keep = 1 - value
    if keep > 0.0 and -abs(2 * value - 3) / 2 < 0 and 2**value > value**2 and 1 / keep != 0:
        x = x / keep
    return x * (value + 1)


def of_math(x: Tensor, value: float) -> Tensor:
    """Functions of numbers: alike in all members, as `int`, or each member's own."""
    x = x[:, int(value) : 2 + math.floor(value / 2)] if not math.isclose(value, 5) else x
    scale = math.exp(-value) + math.sqrt(1 - value) * math.cos(math.pi * value) + math.pow(value, math.ceil(9 * value))
    scale += math.pow(value, Fraction(1, 2))
    return x * scale + round(value, 1) - round(10 * value) + torch.arange(2) // math.ceil(9 * value)


DETERMINISTIC: list[tuple[str, Callable[[float], nn.Module], Tensor]] = [
    ("arithmetic", lambda v: With(v, lambda x, s: (x * s + s) ** 2 - s / (1 + x.exp())), ROWS),
    ("clamp", lambda v: With(v, lambda x, s: x.clamp(-s, s)), ROWS),
    ("masked_fill", lambda v: With(v, lambda x, s: x.masked_fill(x > s, s)), ROWS),
    ("alpha", lambda v: With(v, lambda x, s: x.add(x, alpha=s)), ROWS),
    ("full", lambda v: With(v, lambda x, s: x + torch.full((4,), s)), ROWS),
    ("huber", lambda v: With(v, lambda x, s: F.huber_loss(x, torch.zeros_like(x), delta=s)), ROWS),
    ("branch", lambda v: With(v, branch), ROWS),
    ("comparison", lambda v: With(v, lambda x, s: x * (s > 0.3) - x * (s <= 0.07)), ROWS),
    ("distribution", lambda v: With(v, lambda x, s: torch.distributions.Normal(0.0, s).log_prob(x)), ROWS),
    ("math", lambda v: With(v, of_math), ROWS),
    ("computed", lambda v: With(v, computed), ROWS),
    ("leaky-relu", nn.LeakyReLU, ROWS),
    ("elu", nn.ELU, ROWS),
    ("leaky-relu-in-place", lambda v: nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(v, inplace=True)), ROWS),
    ("softplus", nn.Softplus, ROWS),
    ("hardtanh", lambda v: nn.Hardtanh(-v, v), ROWS),
    ("layer-norm", lambda v: nn.LayerNorm(4, eps=v), ROWS),
    ("group-norm", lambda v: nn.GroupNorm(2, 4, eps=v), IMAGES),
    ("batch-norm-eps", lambda v: nn.BatchNorm2d(4, eps=v), IMAGES),
    ("batch-norm-momentum", lambda v: nn.BatchNorm2d(4, momentum=v), IMAGES),
]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["fused", "one-by-one"])
@pytest.mark.parametrize(("make", "x"), [case[1:] for case in DETERMINISTIC], ids=[case[0] for case in DETERMINISTIC])
def test_each_member_computes_with_its_own(make: Any, x: Tensor, one_by_one: bool) -> None:
    models = [make(value) for value in VALUES]
    fused = fuse(models, one_by_one=one_by_one)
    out_K = fused(x)
    if out_K.requires_grad:
        out_K.sum().backward()
    for k, model in enumerate(models):
        out = model(x)
        torch.testing.assert_close(out_K[k], out)
        if out.requires_grad:
            out.sum().backward()
    if out_K.requires_grad:
        assert_same_gradients(fused, models, partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5))
    assert_same_states(fused, models)


def test_a_number_that_forward_goes_on_computing_with_leaves_the_float_as_it_is() -> None:
    def augmented(x: Tensor, value: float) -> Tensor:
        rate = value
        rate += 0.5
        rate -= 0.25
        rate *= 3
        rate /= 2
        rate **= 2
        x = x * rate if rate > 0 else x
        value //= 0.3
        rate %= 5
        return x + value + rate

    models = [With(value, augmented) for value in VALUES]
    fused = fuse(models)
    for _ in range(2):
        torch.testing.assert_close(fused(ROWS), torch.stack([model(ROWS) for model in models]))


def test_functions_of_numbers_are_put_back() -> None:
    before = dict(vars(math)), round

    def fail(x: Tensor, value: float) -> Tensor:
        assert math.exp(value) != math.exp(1.0) == before[0]["exp"](1.0)
        assert math.copysign(1.0, -0.0 * value) == -1  # alike, and 0.0 in no member
        raise RuntimeError("the end")

    with pytest.raises(RuntimeError, match="the end"):
        fuse([With(value, fail) for value in VALUES])(ROWS)
    assert (dict(vars(math)), round) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_label_smoothing(dtype: torch.dtype) -> None:
    models = [nn.Sequential(nn.Linear(4, 3), nn.CrossEntropyLoss(label_smoothing=s)).to(dtype) for s in VALUES]
    target = torch.tensor([0, 1, 2, 0, 1, 2])

    def objective(model: Any, x: Tensor) -> Any:
        return model[1](model[0](x), target)

    loss_K = fuse(models).map(objective, ROWS.to(dtype))
    assert loss_K.dtype == dtype
    for k, model in enumerate(models):
        torch.testing.assert_close(loss_K[k], objective(model, ROWS.to(dtype)))


def with_dropout(module: nn.Module, p: float) -> nn.Module:
    """A copy in which every dropout probability is `p`."""
    module = copy.deepcopy(module)
    for child in module.modules():
        for name in ("p", "dropout"):
            if isinstance(vars(child).get(name), float):
                setattr(child, name, p)
    return module


DROPOUTS: list[tuple[str, nn.Module, Tensor]] = [
    ("dropout", nn.Dropout(0.5), ROWS),
    ("dropout2d", nn.Dropout2d(0.5), IMAGES),
    ("alpha-dropout", nn.AlphaDropout(0.5), ROWS),
    ("attention", nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True), SEQUENCES),
    ("lstm", nn.LSTM(4, 3, 2, dropout=0.5), SEQUENCES),
]


@pytest.mark.parametrize(("module", "x"), [case[1:] for case in DROPOUTS], ids=[case[0] for case in DROPOUTS])
def test_dropout_acts_in_the_members_that_have_it(module: nn.Module, x: Tensor) -> None:
    """The member with (next to) no dropout returns what the module does in eval mode, the others do not."""

    def output(model: Any, x: Tensor) -> Any:
        out = model(x)
        return out[0] if isinstance(out, tuple) else out

    fused = fuse([with_dropout(module, p) for p in (1e-12, 0.4, 0.8)])
    expected = output(module.eval(), x)
    module.train()
    out_K = fused.map(output, x)
    torch.testing.assert_close(out_K[0], expected)
    assert not torch.allclose(out_K[1], expected)
    assert not torch.allclose(out_K[1], out_K[2])
    torch.testing.assert_close(fused.eval().map(output, x), expected.expand_as(out_K))


def test_dropout_drops_with_the_members_own_probability() -> None:
    p = [0, 0.1, 0.5, 0.9, 1.0]
    fused = fuse([nn.Dropout(value) for value in p])
    kept_K = (fused(torch.ones(100_000)) != 0).double().mean(1)
    # Four standard deviations of a binomial proportion: 4 sqrt(1/4 / 100,000) < 0.007.
    torch.testing.assert_close(kept_K, 1 - torch.tensor(p, dtype=torch.float64), rtol=0, atol=0.007)
    means_K = fused(torch.ones(100_000)).mean(1)
    torch.testing.assert_close(means_K[:4], torch.ones(4), rtol=0, atol=0.05)


def test_members_with_equal_dropout_draw_apart() -> None:
    out_K = fuse([nn.Dropout(0.5)] * 2)(torch.ones(1000))
    assert not torch.equal(out_K[0], out_K[1])


def test_settings_follow_keep_concat_and_unfuse() -> None:
    fused = fuse([nn.Dropout(p) for p in VALUES])
    assert fused.settings["p"].tolist() == VALUES
    fused.keep([2])
    assert fused.settings == {}
    assert fused.unfuse(0).p == VALUES[2]
    assert isinstance(fused.template, nn.Dropout)
    assert fused.template.p == VALUES[2]
    fused.concat(fuse([nn.Dropout(0.2)]))
    assert fused.settings["p"].tolist() == [VALUES[2], 0.2]
    assert fused.unfuse(1).p == 0.2


class Slowing(nn.Module):
    """Forward sets a float of a layer, which is equal in all members, from one in which they differ."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.linear, self.activation, self.slope, self.calls = nn.Linear(4, 3), nn.LeakyReLU(0.5), slope, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.activation.negative_slope = self.slope / self.calls
        out: Tensor = self.activation(self.linear(x))
        return out


@pytest.mark.parametrize("one_by_one", [False, True])
def test_members_whose_forward_sets_an_equal_float_can_be_kept_and_unfused(one_by_one: bool) -> None:
    models = [Slowing(value) for value in VALUES]
    fused = fuse(models, one_by_one=one_by_one)
    for order in ([0, 1, 2], [2, 0, 1], [1, 0]):
        fused.keep(order)
        models = [models[k] for k in order]
        torch.testing.assert_close(fused(ROWS), torch.stack([model(ROWS) for model in models]))
        torch.testing.assert_close(fused.unfuse(1)(ROWS), copy.deepcopy(models[1])(ROWS))


def test_attention_without_dropout_is_fused_with_others_whatever_its_number() -> None:
    fused = fuse([nn.MultiheadAttention(4, 2, dropout=dropout) for dropout in (0, 0.1)])
    assert fused.settings["dropout"].tolist() == [0, 0.1]


def test_a_member_that_is_kept_twice_becomes_two() -> None:
    fused = fuse([nn.Dropout(p) for p in VALUES])
    fused.keep([0, 0, 2])
    fused.copy({1: 2})
    assert fused.settings["p"].tolist() == [VALUES[0], VALUES[2], VALUES[2]]


def test_settings_survive_a_copy() -> None:
    twin = copy.deepcopy(fuse([nn.Dropout(p) for p in VALUES]))
    twin.keep([2, 0])
    assert twin.settings["p"].tolist() == [VALUES[2], VALUES[0]]
    assert [vars(twin.unfuse(k))["p"] for k in range(2)] == [VALUES[2], VALUES[0]]


def test_settings_leave_the_template_as_it_was() -> None:
    fused = fuse([nn.Dropout(p) for p in VALUES])
    fused(ROWS)
    assert fused.template.p == VALUES[0]
    with pytest.raises(RuntimeError):
        fused.map(lambda model, x: model(x).item(), ROWS)
    assert fused.template.p == VALUES[0]


def test_a_hook_with_its_own_multiplier() -> None:
    def scaled(scale: float) -> nn.Module:
        module = nn.Linear(4, 2)
        module.register_forward_pre_hook(Multiply(scale))
        return module

    models = [scaled(value) for value in VALUES]
    torch.testing.assert_close(fuse(models)(ROWS), torch.stack([model(ROWS) for model in models]))


class Multiply:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * self.scale, *args[1:])


def in_closure(limit: float) -> nn.Module:
    config = {"limit": limit}

    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * config["limit"]).clamp(max=config["limit"])

    return Local()


def test_a_configuration_in_a_closure() -> None:
    models = [in_closure(value) for value in VALUES]
    torch.testing.assert_close(fuse(models)(ROWS), torch.stack([model(ROWS) for model in models]))
