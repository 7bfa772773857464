"""Modules padded with zeros to the shapes of wider ones, against each of them alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fusion import clip_grad_norm_, fuse, fused_optimizer, fusion_key
from fusion.hyperparameters import OPTIMIZERS
from fusion.optim import optimizer
from fusion.padding import (
    PADDABLE,
    fits_into,
    form_of,
    keeps_zeros,
    padded,
    padded_to,
    pads_exactly,
    resized_state,
)

Build = Callable[[int], nn.Module]
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(20, (8, 5), generator=torch.Generator().manual_seed(2))
Y = torch.arange(8) % 3


def loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def between(*layers: Callable[[int], nn.Module]) -> Build:
    """A model with layers between one that writes the units and one that reads them."""
    return lambda width: nn.Sequential(nn.Linear(6, width), *(layer(width) for layer in layers), nn.Linear(width, 3))


def of_images(width: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    conv = nn.Conv2d(3, width, 3, padding=1)
    return nn.Sequential(conv, norm(width), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 3))


def depthwise(width: int, groups: int | None = None) -> nn.Module:
    convs = nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 3, groups=groups or width)
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))


def kernels(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, width // 2 + 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))


class MeanOfTokens(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(x).mean(1))
        return out


def transformer(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
    return nn.Sequential(nn.Embedding(20, width), layer, nn.Flatten(), nn.Linear(5 * width, 3))


EXACT: dict[str, tuple[Build, Tensor]] = {
    "relu": (between(lambda _: nn.ReLU()), X),
    "gelu": (between(lambda _: nn.GELU()), X),
    "tanh": (between(lambda _: nn.Tanh(), lambda width: nn.Linear(width, width), lambda _: nn.Tanh()), X),
    "batch norm": (between(nn.BatchNorm1d, lambda _: nn.ReLU()), X),
    "dropout of inputs": (lambda width: nn.Sequential(nn.Dropout(0.5), between()(width)), X),
    "convolution, flattened": (of_images, IMAGES),
    "depthwise": (depthwise, IMAGES),
    "embedding": (MeanOfTokens, TOKENS),
}
INEXACT: dict[str, tuple[Build, Tensor]] = {
    "not zero at zero": (between(lambda _: nn.Sigmoid()), X),
    "layer norm": (between(nn.LayerNorm), X),
    "RMS norm": (between(nn.RMSNorm), X),
    "group norm": (functools.partial(of_images, norm=lambda width: nn.GroupNorm(2, width)), IMAGES),
    "softmax": (between(lambda _: nn.Softmax(1)), X),
    "dropout of units": (between(lambda _: nn.Dropout(0.5)), X),
    "dropout of units, zero now": (between(lambda _: nn.Dropout(0.0)), X),
    "two groups": (functools.partial(depthwise, groups=2), IMAGES),
    "larger kernels": (kernels, IMAGES),
    "units not last": (
        lambda width: nn.Sequential(nn.Embedding(20, width), nn.Flatten(), nn.Linear(5 * width, 3)),
        TOKENS,
    ),
    "attention": (transformer, TOKENS),
    "no float64": (between(lambda _: OnlyFloat32()), X),
}


class OnlyFloat32(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return x


@pytest.mark.parametrize("name", EXACT)
def test_where_padding_is_exact(name: str) -> None:
    build, x = EXACT[name]
    assert pads_exactly(build(4), build(8), loss, (x, Y[: len(x)]))


@pytest.mark.parametrize("name", INEXACT)
def test_where_padding_is_not(name: str) -> None:
    build, x = INEXACT[name]
    assert not pads_exactly(build(4), build(8), loss, (x, Y[: len(x)]))


def test_an_objective_that_reads_units_decides_too() -> None:
    def penalized(model: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": loss(model, batch), "penalty": model[0](batch[0]).abs().mean()}

    build, x = EXACT["relu"]
    assert not pads_exactly(build(4), build(8), penalized, (x, Y))


def test_the_check_leaves_models_and_random_numbers_alone() -> None:
    build, x = EXACT["batch norm"]
    modules = [build(4), build(8)]
    before = [{name: tensor.clone() for name, tensor in module.state_dict().items()} for module in modules]
    state = torch.get_rng_state()
    assert pads_exactly(modules[0], modules[1], loss, (x, Y))
    assert torch.equal(state, torch.get_rng_state())
    for module, was in zip(modules, before, strict=True):
        close(dict(module.state_dict()), was)
        assert all(parameter.grad is None for parameter in module.parameters())


def test_what_may_differ_in_structure() -> None:
    narrow, wide = (fusion_key(nn.Linear(2, width)) for width in (3, 6))
    assert form_of(narrow) == form_of(wide) != form_of(fusion_key(nn.Linear(2, 3, bias=False)))
    assert fits_into(narrow, wide)
    assert not fits_into(wide, narrow)
    assert not fits_into(narrow, narrow)
    embeddings = [nn.Embedding(9, 4, padding_idx=2), nn.Embedding(9, 8, padding_idx=3)]
    assert not fits_into(*map(fusion_key, embeddings)), "3 is not twice 2"


def test_floats_and_mode_are_the_narrow_modules_own() -> None:
    narrow, wide = (nn.Sequential(nn.Dropout(p), nn.Linear(2, w), nn.Linear(w, 1)) for p, w in ((0.1, 2), (0.3, 4)))
    found: Any = padded(narrow.eval(), wide)
    assert (found[0].p, found[0].training, found[1].weight.shape) == (0.1, False, (4, 2))
    assert not found[1].weight[2:].any()
    close(found(torch.ones(1, 2)), narrow(torch.ones(1, 2)))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_which_optimizers_keep_zeros(kind: str) -> None:
    assert keeps_zeros({"optimizer": kind, "lr": 0.1}) == (kind in PADDABLE)


def test_an_optimizer_of_the_users_own_may_mix_elements() -> None:
    assert not keeps_zeros({"optimizer": lambda groups, lr: torch.optim.SGD(groups, lr), "lr": 0.1})


MORE: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01},
    "adamw": {"lr": 0.02, "weight_decay": 0.1},
}


@pytest.mark.parametrize("kind", PADDABLE)
def test_twenty_steps_equal_those_of_each_alone(kind: str) -> None:
    """Float64; members are left out, joined, and loaded from a checkpoint in the shapes of their own in between."""
    torch.manual_seed(0)
    # Torch keeps NAdam's product of momenta in float32.
    close = functools.partial(torch.testing.assert_close, rtol=1e-6 if kind == "nadam" else 1e-9, atol=1e-10)
    build = EXACT["tanh"][0]
    widths = [4, 8, 5, 8]
    configs = [{"optimizer": kind, "lr": 0.01 * (k + 1), **MORE.get(kind, {})} for k in range(4)]
    alone = [build(width).double() for width in widths]
    widest = build(8).double()
    fused = fuse(padded_to(widest, alone))
    opt = fused_optimizer(fused, configs)
    own = [optimizer(module, config) for module, config in zip(alone, configs, strict=True)]

    def steps(members: list[int], first: int, count: int) -> None:
        for step in range(first, first + count):
            x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            opt.zero_grad()
            loss_K = fused.map(loss, (x, Y))
            loss_K.sum().backward()
            clip_grad_norm_(fused, 0.5)
            opt.step()
            for k, member in enumerate(members):
                own[member].zero_grad()
                one = loss(alone[member], (x, Y))
                one.backward()
                nn.utils.clip_grad_norm_(alone[member].parameters(), 0.5)
                own[member].step()
                close(loss_K[k].detach(), one.detach())

    steps([0, 1, 2, 3], 0, 7)
    state = {"model": fused.state_dict(), "optimizer": opt.state_dict()}
    fused.keep([0, 1, 3])
    opt.keep([0, 1, 3])
    # The others go on in the shapes of their own, from the padded checkpoint, and join in again.
    narrow = fuse([build(5).double()])
    of_narrow = fused_optimizer(narrow, [configs[2]])
    cut = resized_state(state, narrow.template)
    narrow.load_state_dict(cut["model"], members=[2])
    of_narrow.load_state_dict(cut["optimizer"], members=[2])
    close(dict(narrow.unfuse(0).named_parameters()), dict(alone[2].named_parameters()))
    as_it_is = {"model": narrow.state_dict(), "optimizer": of_narrow.state_dict()}
    back = resized_state(as_it_is, fused.template)
    again = fuse(padded_to(widest, [alone[2]]))
    of_again = fused_optimizer(again, [configs[2]])
    again.load_state_dict(back["model"])
    of_again.load_state_dict(back["optimizer"])
    fused.concat(again)
    opt.concat(of_again)
    steps([0, 1, 3, 2], 7, 7)
    # The wide member 3 becomes a copy of the narrow member 0.
    fused.copy({2: 0})
    opt.copy({2: 0})
    alone[3], widths[3], configs[3] = copy.deepcopy(alone[0]), widths[0], configs[0]
    own[3] = optimizer(alone[3], configs[3])
    own[3].load_state_dict(copy.deepcopy(own[0].state_dict()))
    steps([0, 1, 3, 2], 14, 6)
    final = {"model": fused.state_dict(), "optimizer": opt.state_dict()}
    for k, member in enumerate((0, 1, 3, 2)):
        one = fuse([build(widths[member]).double()])
        of_one = fused_optimizer(one, [configs[member]])
        cut = resized_state(final, one.template)
        one.load_state_dict(cut["model"], members=[k])
        of_one.load_state_dict(cut["optimizer"], members=[k])
        exported = one.unfuse(0)
        close(dict(exported.named_parameters()), dict(alone[member].named_parameters()))
        theirs = of_one.unfuse(0, exported)
        for p, q in zip(exported.parameters(), alone[member].parameters(), strict=True):
            for name, value in own[member].state[q].items():
                close(torch.as_tensor(theirs.state[p][name]).double(), torch.as_tensor(value).double())
        for name, tensor in fused.stacked.items():
            beyond = tensor[k].detach().clone()
            beyond[tuple(map(slice, exported.get_parameter(name).shape))] = 0
            assert not beyond.any()
