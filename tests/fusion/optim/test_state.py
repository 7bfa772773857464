"""The state of fused optimizers through copies, pickles, freezing and other optimizers' states."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusedModel, FusedOptimizer, fuse, fused_optimizer
from fusion.optim import optimizer

K = 3
X, Y = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(1))
Pair = tuple[FusedModel, FusedOptimizer]


class Slowing(torch.optim.Optimizer):
    """Counts its steps in an attribute, which torch's copies of an optimizer lack."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.taken)


AMSGRAD = partial(torch.optim.Adam, amsgrad=True)
CONFIGS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "lr": 0.1},
    {"optimizer": "prodigy", "lr": 1.0, "d0": 0.01},
    {"optimizer": "schedule_free_adamw", "lr": 0.1},
    {"optimizer": "muon", "lr": 0.1},
    {"optimizer": "adagrad", "lr": 0.1},
    {"optimizer": Slowing, "lr": 0.5},
    {"optimizer": "prodigy", "lr": 1.0, "optimizer.4": "schedule_free_sgd"},
]
NAMES = [str(config["optimizer"]) for config in CONFIGS]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def made(config: dict[str, Any], *, frozen: bool = False, alike: bool = False) -> Pair:
    torch.manual_seed(0)
    first = net()
    models = [first, *(copy.deepcopy(first) if alike else net() for _ in range(K - 1))]
    for model in models:
        model[0].requires_grad_(not frozen)
    fused = fuse(models)
    return fused, fused_optimizer(fused, [config] * K)


def train(fused: FusedModel, opt: FusedOptimizer, steps: int = 3, batch: tuple[Tensor, Tensor] = (X, Y)) -> None:
    for _ in range(steps):
        opt.zero_grad()
        fused.map(objective, batch).sum().backward()
        opt.step()


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert_same(value, theirs[key])
    elif isinstance(ours, list | tuple):
        for value, other in zip(ours, theirs, strict=True):
            assert_same(value, other)
    else:
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_a_copy_of_a_model_and_its_optimizer_goes_on_alike(
    config: dict[str, Any], twin: Callable[[Pair], Pair]
) -> None:
    fused, opt = made(config)
    train(fused, opt)
    again = twin((fused, opt))
    train(fused, opt)
    train(*again)
    with opt.evaluating(), again[1].evaluating():
        assert_same(fused.state_dict(), again[0].state_dict())
    assert_same(opt.state_dict(), again[1].state_dict())


@pytest.mark.parametrize("config", [config for config in CONFIGS if config["optimizer"] is not Slowing])
def test_the_state_follows_the_parameters_to_another_dtype(config: dict[str, Any]) -> None:
    fused, opt = made(config)
    train(fused, opt)
    model = fused.unfuse(1)
    alone = opt.unfuse(1, model)
    batch = X.double(), Y.double()
    train(fused.double(), opt, batch=batch)
    model.double()
    alone.load_state_dict(alone.state_dict())  # torch brings the state to the dtype of the parameters only here
    for _ in range(3):
        alone.zero_grad()
        objective(model, batch).backward()
        alone.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(fused.stacked[name][1], p)


class Mixed(nn.Module):
    """Its first parameter stays as it is where the others take its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        y: Tensor = self.second(h.to(self.second.weight.dtype))
        return y.to(x.dtype)


@pytest.mark.parametrize("kind", ["rmsprop", "adam", "adafactor", "adagrad"])
def test_the_state_follows_all_parameters_where_the_first_one_keeps_its_dtype(kind: str) -> None:
    models = [Mixed() for _ in range(K)]
    fused = fuse(models)
    opt = fused_optimizer(fused, [{"optimizer": kind, "lr": 0.1}] * K)
    train(fused, opt)
    model = fused.unfuse(1)
    alone = opt.unfuse(1, model)
    train(fused.float(), opt)
    model.float()
    alone.load_state_dict(alone.state_dict())
    for _ in range(3):
        alone.zero_grad()
        objective(model, (X, Y)).backward()
        alone.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(fused.stacked[name][1], p)


@pytest.mark.parametrize("optimizer", ["adagrad", AMSGRAD, Slowing])
def test_members_that_torch_updates_have_a_state_of_their_own(optimizer: Any) -> None:
    """After `concat` the other optimizer keeps its members, and one that joins itself has each of them twice."""
    fused, opt = made({"optimizer": optimizer, "lr": 0.1})
    other, its = made({"optimizer": optimizer, "lr": 0.1})
    for pair in ((fused, opt), (other, its)):
        train(*pair)
    fused.concat(other)
    opt.concat(its)
    fused.concat(fused)
    opt.concat(opt)
    train(fused, opt)
    train(other, its)
    for name, p in fused.stacked.items():
        for k in range(0, 4 * K, K):
            torch.testing.assert_close(p[k : k + K], other.stacked[name])


def test_members_of_a_class_with_attributes_are_kept_and_copied() -> None:
    fused, opt = made({"optimizer": Slowing, "lr": 0.5})
    train(fused, opt)
    for part in (fused, opt):
        part.keep([2, 0, 2])
        part.copy({1: 0})
    train(fused, opt)
    alone, its = made({"optimizer": Slowing, "lr": 0.5})
    train(alone, its, 6)
    for name, p in fused.stacked.items():
        for member in p:
            torch.testing.assert_close(member, alone.stacked[name][2])


@pytest.mark.parametrize("loads", [False, True], ids=["takes", "loads"])
def test_rates_of_parts_may_coincide_in_one_members_new_configuration(loads: bool) -> None:
    """Its parameters then form fewer groups, but train on as in groups whose rates hardly differ."""
    found = []
    for rate in (0.2, 0.2 * (1 + 1e-12)):
        config = {"optimizer": "adagrad", "lr": 0.1, "lr.0": 0.3, "lr.2": 0.2}
        fused, opt = made(config)
        train(fused, opt)
        new = fused_optimizer(fused, [config, config | {"lr.0": rate}, config | {"lr.2": 0.1}])
        if loads:
            new.load_state_dict(opt.state_dict(), hyperparameters=False)
            opt = new
        else:
            opt.take_hyperparameters(new)
        train(fused, opt)
        found.append((fused.state_dict(), opt.unfuse(1, fused.unfuse(1))))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert [len(optimizer.param_groups) for _, optimizer in found] == [2, 3]


@pytest.mark.parametrize("alike", [False, True], ids=["stacked", "held once"])
def test_a_step_refuses_parameters_that_were_frozen_and_a_new_optimizer_trains_them(alike: bool) -> None:
    fused, opt = made({"lr": 0.1, "optimizer.4": "sgd"}, frozen=True, alike=alike)
    train(fused, opt)
    assert len(fused.shared) == 2 * alike
    fused.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"`0\.weight` was frozen when the optimizer was made: make a new one"):
        train(fused, opt, 1)
    models = [fused.unfuse(k) for k in range(K)]
    opt = fused_optimizer(fused, [{"lr": 0.1}] * K)
    train(fused, opt)
    for k, model in enumerate(models):
        alone = optimizer(model, {"lr": 0.1})
        for _ in range(3):
            alone.zero_grad()
            objective(model, (X, Y)).backward()
            alone.step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(fused.stacked[name][k], p, rtol=1e-4, atol=1e-5)


def test_the_state_of_another_optimizer_is_not_taken_for_its_own() -> None:
    fused, opt = made({"optimizer": "adam", "lr": 0.1})
    train(fused, opt)
    made({"optimizer": "adamw", "lr": 0.1})[1].load_state_dict(opt.state_dict(), hyperparameters=False)
    with pytest.raises(ValueError, match=r"`hyperparameters` is False.*optimizers of `state_dict`, \['adam', 'adam'"):
        made({"optimizer": "schedule_free_adamw", "lr": 0.1})[1].load_state_dict(
            opt.state_dict(), hyperparameters=False
        )


def test_without_the_hyperparameters_of_a_state_its_multipliers_stay_behind_too() -> None:
    fused, opt = made({"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.1})
    train(fused, opt)
    config = {"optimizer": "sgd", "lr": 0.2, "weight_decay": 0.2}
    factors = {"lr_multipliers": 3.0, "weight_decay_multipliers": 5.0}
    given = {name: {"sgd": {"0.weight": factor}} for name, factor in factors.items()}
    loading, plain = (fused_optimizer(fused, [config] * K, **given) for _ in range(2))
    loading.load_state_dict(opt.state_dict(), hyperparameters=False)
    taking = fused_optimizer(fused, [config] * K)
    taking.take_hyperparameters(plain)
    for each in (loading, taking):
        for name in given:
            assert torch.equal(each.state_dict()[name], plain.state_dict()[name])
    loading.load_state_dict(opt.state_dict())
    for name in given:
        assert torch.equal(loading.state_dict()[name], opt.state_dict()[name])


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad", "schedule_free_sgd"])
def test_members_that_are_chosen_in_inference_mode_train_on(optimizer: str) -> None:
    """A first evaluation makes state that steps write to; `keep`, `concat` and `unfuse` make new tensors."""
    fused, opt = made({"optimizer": optimizer, "lr": 0.1})
    with torch.inference_mode(), opt.evaluating():
        fused.map(objective, (X, Y))
    train(fused, opt)
    other, its = made({"optimizer": optimizer, "lr": 0.1})
    train(other, its)
    with torch.inference_mode():
        fused.keep([2, 0])
        opt.keep([2, 0])
        fused.concat(other)
        opt.concat(its)
        module = fused.unfuse(1)
        alone = opt.unfuse(1, module)
    train(fused, opt, 1)
    train(other, its, 1)
    alone.zero_grad()
    objective(module, (X, Y)).backward()
    alone.step()
    for name, p in fused.stacked.items():
        torch.testing.assert_close(p[[0, 1]], other.stacked[name][[2, 0]])
        torch.testing.assert_close(p[1], module.get_parameter(name))


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad", "schedule_free_sgd"])
def test_a_state_that_is_loaded_in_inference_mode_trains_on(optimizer: str) -> None:
    """As when training goes back to its best state during an evaluation."""
    fused, opt = made({"optimizer": optimizer, "lr": 0.1})
    train(fused, opt)
    saved = copy.deepcopy((fused.state_dict(), opt.state_dict()))
    train(fused, opt)
    after = copy.deepcopy(dict(fused.state_dict()))
    with torch.inference_mode():
        fused.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        opt.schedule([[1.0] * K])
    train(fused, opt)
    assert_same(dict(fused.state_dict()), after)


def test_parameters_that_were_frozen_when_they_were_saved_learn_where_they_are_loaded() -> None:
    """A second phase of training: its optimizer's state is then loaded by models that were never frozen."""
    first, opt = made({"lr": 0.1}, frozen=True, alike=True)
    train(first, opt)
    fused, opt = made({"lr": 0.1}, alike=True)
    fused.load_state_dict(first.state_dict())
    assert not fused.shared
    assert torch.equal(fused.stacked["0.weight"][1], first.shared["0.weight"])
    first.requires_grad_(True)
    its = fused_optimizer(first, [{"lr": 0.1}] * K)
    train(first, its)
    train(fused, opt)
    assert_same(dict(fused.state_dict()), dict(first.state_dict()))
    opt.load_state_dict(its.state_dict())
    train(first, its)
    train(fused, opt)
    assert_same(dict(fused.state_dict()), dict(first.state_dict()))
