"""Hooks on parameters do fused what they do in K models that `torch.optim` trains."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import dry_run, fuse, fusion_key
from fusion.structure.module_parts import duplicate
from tests.fusion.training import Both

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


class Hooked(nn.Module):
    """What is hooked reads a number, a buffer and a parameter of its own member."""

    mask: Tensor

    def __init__(self, hook: Callable[["Hooked"], None], by_data: bool) -> None:
        super().__init__()
        self.layer, self.factor, self.by_data = nn.Linear(4, 3), 0.3, by_data
        self.register_buffer("mask", (torch.rand(3, 4) > 0.5).float())
        hook(self)

    def scaled(self, grad: Tensor) -> Tensor:
        return grad * self.mask * self.factor + 0.1 * self.layer.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out * x.sum().sign().item() if self.by_data else out


def by_constant(model: Hooked) -> None:
    model.layer.weight.register_hook(lambda grad: grad * 0.1)


def by_tensor(model: Hooked) -> None:
    mask = torch.arange(12).view(3, 4) % 2
    model.layer.weight.register_hook(lambda grad: grad * mask)


def by_method(model: Hooked) -> None:
    model.layer.weight.register_hook(model.scaled)


def by_self(model: Hooked) -> None:
    model.layer.weight.register_hook(lambda grad: model.scaled(grad) + model.factor)


def several(model: Hooked) -> None:
    def doubles(grad: Tensor) -> None:
        grad.mul_(2)

    model.layer.weight.register_hook(lambda grad: grad * 0.1)
    model.layer.weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
    model.layer.bias.register_hook(doubles)


def clamped_after(model: Hooked) -> None:
    def clamp(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.clamp_(-0.01, 0.01)

    model.layer.weight.register_post_accumulate_grad_hook(clamp)


def replaced_after(model: Hooked) -> None:
    def replace(p: Tensor) -> None:
        assert p.grad is not None
        p.grad, p.data = p.grad.sign(), 0.9 * p.data

    model.layer.weight.register_post_accumulate_grad_hook(replace)


HOOKS = [by_constant, by_tensor, by_method, by_self, several, clamped_after, replaced_after]


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore::fusion.FusionWarning")
@pytest.mark.parametrize("by_data", [False, True], ids=["at once", "in turn"])
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_members_train_as_alone(hook: Callable[[Hooked], None], K: int, by_data: bool) -> None:
    torch.manual_seed(0)
    models = [Hooked(hook, by_data) for _ in range(K)]
    fused = fuse(models)
    dry_run(fused, loss, (X, Y))
    configs = [{"optimizer": "adam", "lr": 0.05 / (1 + k), "weight_decay": 0.1} for k in range(K)]
    both = Both(fused, models, configs, loss)
    for step in range(5):
        if step == 2 and K > 1:
            both.keep([2, 0])
        if step == 3:
            both.fused = both.opt.fused = copy.deepcopy(fused)
        both.step((X, Y))
    both.assert_equal()
    for k, model in enumerate(both.models):
        one = both.fused.unfuse(k)
        for module in (one, model):
            module.zero_grad()
            loss(module, (X, Y)).backward()
        torch.testing.assert_close(one.get_parameter("layer.weight").grad, model.get_parameter("layer.weight").grad)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_a_duplicate_has_the_hooks_too(hook: Callable[[Hooked], None]) -> None:
    model = Hooked(hook, False)
    twin = duplicate(model)
    for module in (model, twin):
        loss(module, (X, Y)).backward()
    torch.testing.assert_close(dict(twin.state_dict()), dict(model.state_dict()))
    torch.testing.assert_close(twin.get_parameter("layer.weight").grad, model.layer.weight.grad)
    vars(twin)["factor"] = 7.0
    assert model.factor == 0.3


def by_parameter(model: Hooked) -> None:
    weight = model.layer.weight
    weight.register_hook(lambda grad: grad + weight.detach())


def test_a_hook_that_would_go_on_reading_another_models_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hook on a parameter .*layer\.weight\.hooks\.on_gradient\[0\]"):
        fuse([Hooked(by_parameter, False)])


def test_hooks_count_as_structure() -> None:
    keys = {fusion_key(Hooked(hook, False)) for hook in HOOKS}
    assert len(keys) == len(HOOKS)
    assert fusion_key(Hooked(by_self, False)) == fusion_key(Hooked(by_self, False))


class Late(nn.Linear):
    """Its hook would be lost with what forward sees of the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.register_hook(lambda grad: grad * 0.5)
        return super().forward(x)


@pytest.mark.parametrize("K", [1, 3])
def test_a_hook_that_forward_registers_on_a_parameter_is_refused(K: int) -> None:
    fused = fuse([Late(4, 3) for _ in range(K)], one_by_one=True)
    with pytest.raises(RuntimeError, match="forward registers a hook on weight"):
        fused.map(loss, (X, Y))
