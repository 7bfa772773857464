"""Optimizers of parts of a model against optimizers of `torch.optim` that step side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import clip_grad_norm_, fuse, fused_optimizer
from fusion.optim import optimizer
from fusion.optim.parts import ByPart
from tests.fusion.training import Both

STEPS = 20
X = torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].cumsum(1)


class Model(nn.Module):
    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.ModuleDict({"first": nn.Linear(width, width), "last": nn.Linear(width, 3)})
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head["last"](self.head["first"](self.body(x)).tanh())
        return y


def loss(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(X), Y)


def group(module: nn.Module, lr: float) -> dict[str, Any]:
    return {"params": module.parameters(), "lr": lr}


Optimizers = Callable[[Model], list[torch.optim.Optimizer]]
CASES: list[tuple[dict[str, Any], Optimizers]] = [
    (
        {"optimizer": "adam", "lr": 0.01, "beta1": 0.5, "optimizer.head": "rmsprop", "lr.head": 0.003},
        lambda m: [
            torch.optim.Adam(m.body.parameters(), 0.01, betas=(0.5, 0.999)),
            torch.optim.RMSprop(m.head.parameters(), 0.003),
        ],
    ),
    (
        {"lr": 0.01, "weight_decay.head": 0.3, "lr.head.last": 0.1},
        lambda m: [
            torch.optim.AdamW(m.body.parameters(), 0.01),
            torch.optim.AdamW([group(m.head["first"], 0.01), group(m.head["last"], 0.1)], weight_decay=0.3),
        ],
    ),
    (
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "optimizer.head": "adagrad", "lr.body.2": 0.05},
        lambda m: [
            torch.optim.SGD([group(m.body[0], 0.1), group(m.body[2], 0.05)], momentum=0.9),
            torch.optim.Adagrad(m.head.parameters(), 0.1),
        ],
    ),
    (
        {"optimizer": "adamw", "lr": 0.01, "optimizer.head": "adafactor", "lr.head": 0.05},
        lambda m: [torch.optim.AdamW(m.body.parameters(), 0.01), torch.optim.Adafactor(m.head.parameters(), 0.05)],
    ),
]
CONFIGS = [config for config, _ in CASES]


def by_torch(k: int, max_norm: float | None = None, steps: int = STEPS) -> Model:
    model = Model(k)
    optimizers = CASES[k][1](model)
    for _ in range(steps):
        model.zero_grad()
        loss(model, None).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for each in optimizers:
            each.step()
    return model


close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


def assert_same(found: nn.Module, wanted: nn.Module) -> None:
    close(found.state_dict(), wanted.state_dict())


@pytest.mark.parametrize("max_norm", [None, 0.2])
def test_fused_members_equal_two_optimizers_of_torchs(max_norm: float | None) -> None:
    fused = fuse([Model(k) for k in range(len(CASES))])
    opt = fused_optimizer(fused, CONFIGS)
    flats = set()
    for _ in range(STEPS):
        opt.zero_grad()
        fused.map(loss, None).sum().backward()
        if max_norm is not None:
            clip_grad_norm_(fused, max_norm)
        opt.step()
        flats.add(id(fused._flat))
    assert len(flats) == 1, "parameters moved from step to step"
    for k in range(len(CASES)):
        assert_same(fused.unfuse(k), by_torch(k, max_norm))


@pytest.mark.parametrize("k", range(len(CASES)))
def test_one_module_equals_two_optimizers_of_torchs(k: int) -> None:
    model, half = Model(k), STEPS // 2
    opt = optimizer(model, CONFIGS[k])
    assert isinstance(opt, ByPart)
    for i in range(STEPS):
        if i == half:  # what is loaded takes the place of all that was there
            state = opt.state_dict()
            opt = optimizer(model, CONFIGS[k])
            opt.load_state_dict(state)
        opt.zero_grad()
        loss(model, None).backward()
        opt.step()
    assert_same(model, by_torch(k))


def train(fused: Any, opt: Any, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        fused.map(loss, None).sum().backward()
        opt.step()


def test_members_go_on_after_keep_copy_concat_load_and_unfuse() -> None:
    order = [3, 0, 2, 1]
    halves = []
    for ks in (order[:2], order[2:]):
        fused = fuse([Model(k) for k in ks])
        halves.append((fused, fused_optimizer(fused, [CONFIGS[k] for k in ks])))
        train(*halves[-1], 7)
    (fused, opt), (other, other_opt) = halves
    fused.concat(other)
    opt.concat(other_opt)
    fused.keep([2, 3, 0, 1, 1])
    opt.keep([2, 3, 0, 1, 1])
    fused.copy({4: 2})
    opt.copy({4: 2})
    ks = [2, 1, 3, 0, 3]
    train(fused, opt, 5)
    fresh = fuse([Model(9) for _ in range(3)])
    fresh_opt = fused_optimizer(fresh, [CONFIGS[ks[at]] for at in (4, 1, 0)])
    fresh.load_state_dict(fused.state_dict(), members=[4, 1, 0])
    fresh_opt.load_state_dict(opt.state_dict(), members=[4, 1, 0])
    for at, k in enumerate((3, 1, 2)):
        module = fresh.unfuse(at)
        alone = fresh_opt.unfuse(at, module)
        for _ in range(STEPS - 12):
            alone.zero_grad()
            loss(module, None).backward()
            alone.step()
        assert_same(module, by_torch(k))
    train(fresh, fresh_opt, STEPS - 12)
    for at, k in enumerate((3, 1, 2)):
        assert_same(fresh.unfuse(at), by_torch(k))


def test_hyperparameters_are_those_of_the_members_that_are_left() -> None:
    fused = fuse([Model(0), Model(1)])
    opt = fused_optimizer(fused, CONFIGS[:2])
    before = opt.members
    opt.keep([1])
    assert opt.members == before[1:]


def test_schedules_and_new_hyperparameters_reach_all_parts() -> None:
    fused = fuse([Model(0), Model(1)])
    configs: list[Mapping[str, Any]] = [{"lr": 0.01, "optimizer.head": "sgd", "lr.head": 0.1} for _ in range(2)]
    opt = fused_optimizer(fused, configs)
    opt.schedule([[1.0, 0.5]] * 10)
    train(fused, opt, 10)
    opt.take_hyperparameters(fused_optimizer(fused, [{**config, "lr.head": 0.2} for config in configs]))
    opt.set_lr_factor([0.25, 1.0])
    train(fused, opt, 10)
    for k, (first, second) in enumerate([(1.0, 0.25), (0.5, 1.0)]):
        model = Model(k)
        parts = torch.optim.AdamW(model.body.parameters(), 0.01), torch.optim.SGD(model.head.parameters(), 0.1)
        for i in range(20):
            model.zero_grad()
            loss(model, None).backward()
            for each, rate in zip(parts, (0.01, 0.1 if i < 10 else 0.2)):
                each.param_groups[0]["lr"] = rate * (first if i < 10 else second)
                each.step()
        assert_same(fused.unfuse(k), model)


def test_each_part_has_its_own_matrices_for_muon_and_its_own_estimate_of_prodigy() -> None:
    configs: list[Mapping[str, Any]] = [
        {"optimizer": "muon", "lr": 0.01, "lr.adamw": 0.003, "optimizer.head": "prodigy", "lr.head": 1.0, "d0": 1e-3},
        {"optimizer": "adamw", "lr": 0.01, "optimizer.head": "muon", "lr.adamw": 0.003, "lr.head.first.weight": 0.02},
    ]
    models = [Model(k) for k in range(2)]
    both = Both(fuse(models), models, configs, loss)
    for _ in range(STEPS):
        both.step(None, close=close)
    both.assert_equal(close)
    # The last matrix of a part is its readout, which AdamW updates; each part has one.
    model, opt = models[1], both.alone[1]
    assert isinstance(opt, ByPart)
    first, last = model.head["first"].weight, model.head["last"].weight
    groups = {id(p): group for group in opt.param_groups for p in group["params"]}
    assert groups[id(first)]["use_muon"]
    assert not groups[id(last)]["use_muon"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"optimizer.tail": "sgd"}, r"`optimizer.tail` is 'sgd', but must be left out: .* are \['body', 'head'\]"),
        ({"optimizer.head": "sgd", "beta1.head": 0.5}, "`beta1.head` is 0.5, .* optimizer of 'head', sgd, does not"),
        ({"optimizer.head": "lbfgs"}, "`optimizer.head` is 'lbfgs', but must be one of"),
        ({"beta2.head": 1.5}, r"`beta2.head` is 1.5, but must be in \[0, 1\)"),
        ({"optimizer.body": "adam", "optimizer.body.0": "sgd", "optimizer.body.2": "sgd"}, "`optimizer.body` is"),
        ({"optimizer.head": "sgd", "lr.tail": 0.1}, "`lr.tail` is 0.1, but must be left out"),
    ],
)
def test_settings_of_parts_that_no_part_follows_are_refused(config: dict[str, Any], told: str) -> None:
    model = Model(0)
    with pytest.raises(ValueError, match=told):
        optimizer(model, {"lr": 0.1, **config})
    with pytest.raises(ValueError, match=told):
        fused_optimizer(fuse([model]), [{"lr": 0.1, **config}])


def test_members_with_optimizers_for_other_parts_are_refused() -> None:
    fused = fuse([Model(0), Model(1)])
    with pytest.raises(ValueError, match=r"`configs\[1\]` is .* same parts as `configs\[0\]`, \('head',\)"):
        fused_optimizer(fused, [{"lr": 0.1, "optimizer.head": "sgd"}, {"lr": 0.1}])
    opt = fused_optimizer(fused, [{"lr": 0.1, "optimizer.head": "sgd"}] * 2)
    with pytest.raises(ValueError, match="state_dict"):
        opt.load_state_dict(fused_optimizer(fused, [{"lr": 0.1}] * 2).state_dict())


@pytest.mark.parametrize(
    "config",
    [
        {"lr": 0.01, "optimizer.head": "rmsprop"},
        {"lr": 0.01, "optimizer": "muon"},
        {"lr": 0.01, "optimizer": "muon", "optimizer.head": "schedule_free_sgd"},
    ],
)
def test_a_copy_of_a_model_and_its_optimizer_trains_on_alike(config: dict[str, Any]) -> None:
    model = Model(0).float()
    own = optimizer(model, config)

    def train(model: nn.Module, own: torch.optim.Optimizer) -> None:
        own.zero_grad()
        F.mse_loss(model(X.float()), Y.float()).backward()
        own.step()

    train(model, own)
    pair = copy.deepcopy((model, own))
    before = [p.detach().clone() for p in model.parameters()]
    train(*pair)
    assert all(map(torch.equal, before, model.parameters()))
    train(model, own)
    assert all(map(torch.equal, pair[0].parameters(), model.parameters()))
    assert not any(map(torch.equal, before, model.parameters()))
