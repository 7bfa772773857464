"""Optimizers against those that others wrote: 20 steps in float64, while members are dropped, joined and copied."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusedModel, FusedOptimizer, fuse, fused_optimizer
from fusion.optim import optimizer

X = torch.randn(24, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(24) % 3
K = 4

CONFIGS: dict[str, list[dict[str, Any]]] = {
    "adafactor": [
        {"optimizer": "adafactor", "lr": 0.3 / (1 + k), "beta2_decay": -0.4 - 0.2 * k, "weight_decay": 0.1 * k}
        for k in range(K)
    ],
    "lion": [
        {"optimizer": "lion", "lr": 0.01 * (1 + k), "beta1": 0.9 - 0.1 * k, "beta2": 0.8 + 0.05 * k, "weight_decay": k}
        for k in range(K)
    ],
    "prodigy": [
        {"optimizer": "prodigy", "lr": 1 - k / 5, "weight_decay": k, "beta1": beta1, "beta2": 0.9, "eps": 1e-3}
        | {"d_coef": 1 + k, "d0": 1e-4, "use_bias_correction": k % 2 == 1, "safeguard_warmup": k > 1}
        for k, beta1 in enumerate((0.9, 0.6, 0.3, 0.0))
    ],
}


class Net(nn.Module):
    """A convolution, a norm, matrices of either orientation, and a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 6, 3), nn.LayerNorm(36)
        self.hidden, self.readout = nn.Linear(36, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.readout(torch.tanh(self.hidden(self.norm(self.conv(x).flatten(1))))) * self.scale
        return out


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def nets() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Net() for _ in range(K)]


def factor(step: int) -> float:
    return 0.5 + 0.5 / (1 + step % 7)


def train(fused: FusedModel, opt: FusedOptimizer, steps: Sequence[int]) -> None:
    for step in steps:
        opt.zero_grad()
        opt.set_lr_factor(factor(step))
        fused.map(loss, (X, Y)).sum().backward()
        opt.step()


def train_one(model: nn.Module, opt: torch.optim.Optimizer, lr: float, steps: Sequence[int]) -> None:
    for step in steps:
        model.zero_grad()
        for group in opt.param_groups:
            group["lr"] = lr * factor(step)
        loss(model, (X, Y)).backward()
        opt.step()


PEERS = {"lion": ("lion_pytorch", "Lion"), "prodigy": ("prodigyopt", "Prodigy")}


def oracle(kind: str) -> Callable[[nn.Module, dict[str, Any]], torch.optim.Optimizer]:
    """Return a function that makes the optimizer which others wrote, for a model and a configuration."""
    own = {"adafactor": torch.optim.Adafactor}
    if kind in PEERS:
        package, name = PEERS[kind]
        own[kind] = getattr(pytest.importorskip(package, reason=f"{package} is not installed"), name)

    def make(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        settings = {name: value for name, value in config.items() if name not in ("optimizer", "beta1", "beta2")}
        if "beta1" in config:
            settings["betas"] = config["beta1"], config["beta2"]
        return own[kind](model.parameters(), **settings)

    return make


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10, msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_alone(kind: str) -> None:
    make = oracle(kind)
    for model, config in zip(nets(), CONFIGS[kind]):
        expected = copy.deepcopy(model)
        train_one(model, optimizer(model, config), config["lr"], range(20))
        train_one(expected, make(expected, config), config["lr"], range(20))
        assert_equal(model, expected)


@pytest.mark.parametrize("kind", CONFIGS)
def test_fused_through_all_that_happens_to_members(kind: str) -> None:
    make, configs = oracle(kind), CONFIGS[kind]
    models = nets()
    fused, other = fuse(models[:3]), fuse(models[3:])
    opt, joining = fused_optimizer(fused, configs[:3]), fused_optimizer(other, configs[3:])
    train(fused, opt, range(5))
    train(other, joining, range(5))
    for each in (fused, opt):
        each.keep([2, 0])
    fused.concat(other)
    opt.concat(joining)
    train(fused, opt, range(5, 10))

    buffer = io.BytesIO()
    torch.save((fused.state_dict(), opt.state_dict()), buffer)
    buffer.seek(0)
    of_model, of_optimizer = torch.load(buffer, weights_only=True)
    fused = fuse(nets()[:3])
    opt = fused_optimizer(fused, configs[:3])
    fused.load_state_dict(of_model)
    opt.load_state_dict(of_optimizer)
    train(fused, opt, range(10, 14))
    for part in (fused, opt):
        part.copy({1: 2})
    train(fused, opt, range(14, 17))
    alone = [fused.unfuse(k) for k in range(3)]
    unfused = [opt.unfuse(k, part) for k, part in enumerate(alone)]
    train(fused, opt, range(17, 20))

    for position, k in enumerate((2, 3, 3)):
        model = nets()[k]
        train_one(model, make(model, configs[k]), configs[k]["lr"], range(20))
        assert_equal(fused.unfuse(position), model)
        train_one(alone[position], unfused[position], configs[k]["lr"], range(17, 20))
        assert_equal(alone[position], model)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_that_is_left_out_changes_neither_weights_nor_state(kind: str) -> None:
    """The first one, too: the member goes on as if it had begun a step later."""
    models = nets()
    late, expected = copy.deepcopy(models[1]), copy.deepcopy(models[0])
    fused = fuse(models)
    opt = fused_optimizer(fused, CONFIGS[kind])
    for step in range(6):
        opt.zero_grad()
        fused.map(loss, (X, Y)).sum().backward()
        opt.step(torch.tensor([True, step not in (0, 3), True, True]))
    make = oracle(kind)
    for k, (model, steps) in enumerate(((expected, 6), (late, 4))):
        its = make(model, CONFIGS[kind][k])
        for _ in range(steps):
            model.zero_grad()
            loss(model, (X, Y)).backward()
            its.step()
        assert_equal(fused.unfuse(k), model)


def test_prodigy_rests_without_gradients_and_at_a_rate_of_zero() -> None:
    """At the first step, too."""
    configs = CONFIGS["prodigy"]
    models = nets()
    fused = fuse(models)
    opt, own = fused_optimizer(fused, configs), [oracle("prodigy")(m, c) for m, c in zip(models, configs, strict=True)]
    for of_loss, of_rate in [(0, 1), (1, 0), (1, 1), (1, 1), (0, 1), (1, 0), *[(1, 1)] * 6]:
        opt.zero_grad()
        opt.set_lr_factor(of_rate)
        (of_loss * fused.map(loss, (X, Y))).sum().backward()
        opt.step()
        for model, its, config in zip(models, own, configs, strict=True):
            its.zero_grad()
            for group in its.param_groups:
                group["lr"] = config["lr"] * of_rate
            (of_loss * loss(model, (X, Y))).backward()
            its.step()
        for k, model in enumerate(models):
            assert_equal(fused.unfuse(k), model)


def test_prodigy_with_rates_by_parameter_is_prodigy_of_weights_over_them() -> None:
    """`eps` is next to nothing: it is added to gradients, which are not those of the weights over their rates."""

    class Scaled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.weights = nn.ParameterList(p.detach() / factors[name] for name, p in model.named_parameters())

        def forward(self, x: Tensor) -> Tensor:
            own = {name: w * factors[name] for name, w in zip(factors, self.weights, strict=True)}
            logits: Tensor = torch.func.functional_call(self.model, own, x)
            return logits

    config: dict[str, Any] = {"optimizer": "prodigy", "lr": 0.7, "d0": 1e-3, "eps": 1e-30, "weight_decay": 0.1}
    models = nets()[:2]
    factors = {name: 2.0 ** (i % 5 - 2) for i, (name, _) in enumerate(models[0].named_parameters())}
    own: dict[str, Any] = {
        "lr_multipliers": {"prodigy": factors},
        "weight_decay_multipliers": {"prodigy": {name: 1 / factor for name, factor in factors.items()}},
    }
    fused = fuse(models)
    train(fused, fused_optimizer(fused, [config] * 2, **own), range(20))
    for k, model in enumerate(models):
        scaled, alone = Scaled(copy.deepcopy(model)), copy.deepcopy(model)
        its = oracle("prodigy")(scaled.weights, config)
        train_one(scaled, its, config["lr"], range(20))
        opt = optimizer(alone, config, **own)
        rates = [group["lr"] for group in opt.param_groups]
        for step in range(20):
            opt.zero_grad()
            for group, rate in zip(opt.param_groups, rates, strict=True):
                group["lr"] = rate * factor(step)
            loss(alone, (X, Y)).backward()
            opt.step()
        assert its.param_groups[0]["d"] > 2e-3
        for (name, factor_), weights in zip(factors.items(), scaled.weights, strict=True):
            for ours in (fused.unfuse(k), alone):
                torch.testing.assert_close(ours.get_parameter(name), weights * factor_, rtol=1e-9, atol=1e-11)


def test_adafactor_refuses_complex_parameters_as_torch_does() -> None:
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))})
    with pytest.raises(ValueError, match=r"`optimizer` is 'adafactor', but must be another one .* complex parameters"):
        optimizer(model, {"optimizer": "adafactor", "lr": 0.1})
    with pytest.raises(ValueError, match=r"another one for a model with complex parameters, such as .'weight'."):
        fused_optimizer(fuse([model, copy.deepcopy(model)]), [{"optimizer": "adafactor", "lr": 0.1}] * 2)
