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
    # With these values of `beta2`, RAdam begins to divide by the second moment at its 6th or 7th step.
    "radam": [
        {"optimizer": "radam", "lr": 0.01 * (1 + k), "beta1": 0.9 - 0.2 * k, "beta2": 0.8 + 0.05 * k}
        | {"weight_decay": 0.1 * k, "eps": 10.0 ** (k - 8)}
        for k in range(K)
    ],
    "schedule_free_adamw": [
        {"optimizer": "schedule_free_adamw", "lr": 0.02 * (1 + k), "beta1": 0.9 - 0.2 * k, "beta2": 0.9 + 0.03 * k}
        | {"weight_decay": 0.2 * k, "eps": 10.0 ** (k - 8)}
        for k in range(K)
    ],
    "schedule_free_sgd": [
        {"optimizer": "schedule_free_sgd", "lr": 0.2 * (1 + k), "momentum": 0.9 - 0.2 * k, "weight_decay": 0.1 * k}
        for k in range(K)
    ],
}
SCHEDULE_FREE = ("schedule_free_adamw", "schedule_free_sgd")


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


PEERS = {
    "lion": ("lion_pytorch", "Lion"),
    "prodigy": ("prodigyopt", "Prodigy"),
    "schedule_free_adamw": ("schedulefree", "AdamWScheduleFree"),
    "schedule_free_sgd": ("schedulefree", "SGDScheduleFree"),
}


def oracle(kind: str) -> Callable[[nn.Module, dict[str, Any]], torch.optim.Optimizer]:
    """Return a function that makes the optimizer which others wrote, for a model and a configuration."""
    own: dict[str, Any] = {"adafactor": torch.optim.Adafactor, "radam": torch.optim.RAdam}
    if kind in PEERS:
        package, name = PEERS[kind]
        own[kind] = getattr(pytest.importorskip(package, reason=f"{package} is not installed"), name)

    def make(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        settings = {name: value for name, value in config.items() if name not in ("optimizer", "beta1", "beta2")}
        if "beta1" in config:
            settings["betas"] = config["beta1"], config["beta2"]
        made: torch.optim.Optimizer = own[kind](model.parameters(), **settings)
        if kind in SCHEDULE_FREE:
            made.train()  # type: ignore[attr-defined]
        return made

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


@pytest.mark.parametrize("kind", SCHEDULE_FREE)
def test_schedule_free_weights_to_evaluate(kind: str) -> None:
    """They are the averages, also of members beside others; training goes on from exactly the weights that it left."""
    make, plain = oracle(kind), {"optimizer": "sgd", "lr": 0.1}
    configs = [plain, *CONFIGS[kind][1:3], plain]
    fused = fuse(nets())
    opt = fused_optimizer(fused, configs)
    with opt.evaluating():
        assert_equal(fused.unfuse(1), nets()[1])
    for last in (1, 7, 20):
        train(fused, opt, range(0 if last == 1 else 1 if last == 7 else 7, last))
        before = {name: p.detach().clone() for name, p in fused.stacked.items()}
        with opt.evaluating():
            evaluated = [fused.unfuse(k) for k in range(K)]
        assert all(torch.equal(p, before[name]) for name, p in fused.stacked.items())
        for k in range(K):
            trained = fused.unfuse(k)
            own = opt.unfuse(k, trained)
            if k in (1, 2):
                model = nets()[k]
                its = make(model, configs[k])
                train_one(model, its, configs[k]["lr"], range(last))
                assert_equal(trained, model)
                for each in (own, its):
                    each.eval()  # type: ignore[attr-defined]
                assert_equal(trained, model)
                assert any(not torch.equal(p, before[name][k]) for name, p in model.named_parameters())
            assert_equal(evaluated[k], trained)
    alone = nets()[1]
    single = optimizer(alone, configs[1])
    train_one(alone, single, configs[1]["lr"], range(20))
    single.eval()  # type: ignore[attr-defined]
    assert_equal(alone, evaluated[1])
    with pytest.raises(RuntimeError, match=r"in evaluation mode, but must be in training mode: call its `train\(\)`"):
        train_one(alone, single, 0.1, range(1))
    single.train()  # type: ignore[attr-defined]
    assert_equal(alone, fused.unfuse(1))


@pytest.mark.parametrize("kind", SCHEDULE_FREE)
def test_averages_stay_where_their_share_in_the_weights_that_train_changes(kind: str) -> None:
    """Of a member that goes on with other hyperparameters, and of one that is loaded by an optimizer with others."""
    key = "momentum" if kind == "schedule_free_sgd" else "beta1"
    configs = CONFIGS[kind][1:3]
    changed = [{**configs[0], key: 0.4}, configs[1]]
    fused = fuse(nets()[:2])
    opt = fused_optimizer(fused, configs)
    train(fused, opt, range(7))

    def averages(fused: FusedModel, opt: FusedOptimizer) -> list[nn.Module]:
        with opt.evaluating():
            return [fused.unfuse(k) for k in range(2)]

    before, weights = averages(fused, opt), fused.state_dict()
    other = fuse(nets()[:2])
    loading = fused_optimizer(other, changed)
    other.load_state_dict({name: t.clone() for name, t in weights.items()} if isinstance(weights, dict) else weights)
    loading.load_state_dict(opt.state_dict(), hyperparameters=False)
    trained = [fused.unfuse(k) for k in range(2)]
    opt.take_hyperparameters(fused_optimizer(fused, changed))
    for model, optimizer_ in ((fused, opt), (other, loading)):
        for own, expected in zip(averages(model, optimizer_), before, strict=True):
            assert_equal(own, expected)
        assert_equal(model.unfuse(1), trained[1])
        moved = zip(model.unfuse(0).parameters(), trained[0].parameters(), strict=True)
        assert not any(torch.equal(a, b) for a, b in moved)


@pytest.mark.parametrize("kind", SCHEDULE_FREE)
def test_an_optimizer_with_modes_of_the_users_own_is_evaluated_alike(kind: str) -> None:
    def own(params: Any, lr: float) -> torch.optim.Optimizer:
        package, name = PEERS[kind]
        made: torch.optim.Optimizer = getattr(pytest.importorskip(package), name)(params, lr=lr)
        return made

    configs = [{"optimizer": made, "lr": 0.1} for made in (own, kind, own, kind)]
    models = [copy.deepcopy(nets()[0]) for _ in range(K)]
    fused = fuse(models)
    opt = fused_optimizer(fused, configs)
    train(fused, opt, range(6))
    before = {name: p.detach().clone() for name, p in fused.stacked.items()}
    with opt.evaluating():
        for k in range(1, K):
            assert_equal(fused.unfuse(k), fused.unfuse(0))
        evaluated = fused.unfuse(0)
    assert all(torch.equal(p, before[name]) for name, p in fused.stacked.items())
    assert not torch.equal(evaluated.get_parameter("scale"), before["scale"][0])
    train(fused, opt, range(6, 9))
    for k in range(1, K):
        assert_equal(fused.unfuse(k), fused.unfuse(0))


def test_prodigy_rests_without_gradients_and_at_a_rate_of_zero() -> None:
    """At the first step, too."""
    configs = CONFIGS["prodigy"]
    models, alone = nets(), nets()
    fused = fuse(models)
    opt, own = fused_optimizer(fused, configs), [oracle("prodigy")(m, c) for m, c in zip(models, configs, strict=True)]
    ours = [optimizer(model, config) for model, config in zip(alone, configs, strict=True)]
    for of_loss, of_rate in [(0, 1), (1, 0), (1, 1), (1, 1), (0, 1), (1, 0), *[(1, 1)] * 6]:
        opt.zero_grad()
        opt.set_lr_factor(of_rate)
        (of_loss * fused.map(loss, (X, Y))).sum().backward()
        opt.step()
        for model, its, config in zip(models + alone, own + ours, configs * 2, strict=True):
            its.zero_grad()
            for group in its.param_groups:
                group["lr"] = config["lr"] * of_rate
            (of_loss * loss(model, (X, Y))).backward()
            its.step()
        for k, model in enumerate(models):
            assert_equal(fused.unfuse(k), model)
            assert_equal(alone[k], model)


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
