"""An update of all members takes as many operators as there are kinds of parameters, however many there are."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.fusion_cases import mlp, resnet18
from fusion import clip_grad_norm_, fuse, fused_optimizer
from fusion.members import rows
from fusion.optim import native, optimizer, segments
from fusion.optim.vectorized import Tile

K = 4
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "adamw": [
        {"lr": 0.01, "beta1": 0.9 - 0.1 * k, "beta2": 0.99 - 0.01 * k, "weight_decay": 0.1 * k, "eps": 10.0 ** (k - 8)}
        for k in range(K)
    ],
    "adam": [{"optimizer": "adam", "lr": 0.01 * (k + 1), "weight_decay": 0.1 * k} for k in range(K)],
    "sgd": [{"optimizer": "sgd", "lr": 0.1, "momentum": 0.3 * k, "dampening": 0.1 * k} for k in range(K)],
    "rmsprop": [{"optimizer": "rmsprop", "lr": 0.01, "momentum": 0.3 * k, "alpha": 0.9 + 0.02 * k} for k in range(K)],
    "adamax": [{"optimizer": "adamax", "lr": 0.01, "beta1": 0.3 * k, "weight_decay": 0.1 * k} for k in range(K)],
    "radam": [{"optimizer": "radam", "lr": 0.01, "beta2": 0.6 + 0.1 * k, "weight_decay": 0.1 * k} for k in range(K)],
    "lion": [{"optimizer": "lion", "lr": 0.01, "beta1": 0.3 * k, "weight_decay": 0.1 * k} for k in range(K)],
    "prodigy": [{"optimizer": "prodigy", "lr": 1.0, "d0": 1e-3, "weight_decay": 0.1 * k} for k in range(K)],
    "schedule_free_adamw": [
        {"optimizer": "schedule_free_adamw", "lr": 0.01, "beta1": 0.9 - 0.2 * k, "weight_decay": 0.1 * k}
        for k in range(K)
    ],
    "schedule_free_sgd": [
        {"optimizer": "schedule_free_sgd", "lr": 0.1, "momentum": 0.9 - 0.2 * k, "weight_decay": 0.1 * k}
        for k in range(K)
    ],
    "nadam": [{"optimizer": "nadam", "lr": 0.01, "beta1": 0.3 * k, "weight_decay": 0.1 * k} for k in range(K)],
}
MOST = {"radam": 80, "nadam": 80, "prodigy": 120, "schedule_free_adamw": 70, "schedule_free_sgd": 60}
"""Operators of a step, 40 with other rules: most of theirs work on one number of each member."""
# Adam divides by gradients, some of which are next to nothing.
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-12}
LIMITS = [0.5, 1e9, float("inf"), 2.0]


class Operators(TorchDispatchMode):
    """Notes which operators run, and which take data from the CPU to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.crossings: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        result = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
        if len(devices) > 1:
            self.crossings.append(str(func))
        return result


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks as large as there, all parameters in one, and with none of the kernels that a CPU has."""
    monkeypatch.setattr(native, "takes", lambda tensors: False)
    monkeypatch.setattr(segments, "CHUNK", segments.CHUNK_ELSEWHERE)
    monkeypatch.setattr(rows, "LARGE", math.inf)


def multipliers(module: nn.Module, kind: str, seed: int) -> dict[str, dict[str, float]]:
    """One for each parameter, all different."""
    generator = torch.Generator().manual_seed(seed)
    names = [name for name, _ in module.named_parameters()]
    return {kind: dict(zip(names, torch.rand(len(names), generator=generator).tolist(), strict=True))}


def gradients(module: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(K, *p.shape, generator=generator) for name, p in module.named_parameters()}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("make", [mlp, pytest.param(resnet18, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_operators_move_every_member_as_torch_would(
    make: Callable[[], nn.Module], kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    modules = [make().to(dtype) for _ in range(K)]
    factors = {
        "lr_multipliers": multipliers(modules[0], kind, 1),
        "weight_decay_multipliers": multipliers(modules[0], kind, 2),
    }
    fused = fuse(modules)
    opt = fused_optimizer(fused, CONFIGS[kind], **factors)
    counts = []
    for step in range(3):
        for name, p in fused.stacked.items():
            p.grad = gradients(modules[0], step)[name].to(dtype)
        opt.set_lr_factor(1 / (1 + step))
        with Operators() as operators:
            clip_grad_norm_(fused, LIMITS)
            opt.step()
        counts.append(len(operators.names))
    assert max(counts[1:]) <= MOST.get(kind, 40)
    for k, (module, config) in enumerate(zip(modules, CONFIGS[kind], strict=True)):
        alone = optimizer(module, config, **factors)
        rates = [group["lr"] for group in alone.param_groups]
        for step in range(3):
            for name, p in module.named_parameters():
                p.grad = gradients(module, step)[name][k].to(dtype)
            for group, rate in zip(alone.param_groups, rates, strict=True):
                group["lr"] = rate / (1 + step)
            nn.utils.clip_grad_norm_(module.parameters(), LIMITS[k])
            alone.step()
        for name, p in module.named_parameters():
            # torch keeps the product of NAdam's momenta in float32.
            atol = 1e-8 if kind == "nadam" and dtype == torch.float64 else ROUNDING[dtype]
            torch.testing.assert_close(fused.stacked[name][k], p, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_member_that_leaves_out_its_first_step_stays_as_it_is(kind: str) -> None:
    modules = [nn.Linear(3, 2) for _ in range(K)]
    fused = fuse(modules)
    opt = fused_optimizer(fused, CONFIGS[kind])
    before = fused.stacked["weight"].detach().clone()
    fused.map(lambda model, x: model(x).square().sum(), torch.ones(1, 3)).sum().backward()
    opt.step(torch.tensor([True, False, True, False]))
    same = [torch.equal(fused.stacked["weight"][k], before[k]) for k in range(K)]
    assert same == [False, True, False, True]


def test_no_step_waits_for_the_host() -> None:
    """On a device without data, whatever asks for a value raises; nothing crosses over from the CPU either.

    It is a whole step, with schedules, clipping and slopes that differ, but for dropout: no such device draws numbers.
    """
    modules = [nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.1 * k), nn.Linear(8, 3)).to("meta") for k in range(K)]
    fused = fuse(modules)
    mixed = [*CONFIGS["sgd"][:2], *CONFIGS["adamw"][2:]]
    opt = fused_optimizer(fused, mixed, lr_multipliers=multipliers(modules[0], "adamw", 1))
    batch = torch.empty(5, 4, device="meta"), torch.empty(5, dtype=torch.int64, device="meta")
    opt.schedule([[1 / (1 + step + k) for k in range(K)] for step in range(3)])

    def step() -> None:
        opt.zero_grad()
        fused.map(lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), batch).sum().backward()
        clip_grad_norm_(fused, LIMITS)
        opt.step()

    step()
    with Operators() as operators:
        step()
        step()
    assert not operators.crossings
    asking = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default", "masked_select", "unique")
    assert not [name for name in operators.names if any(word in name for word in asking)]


def test_a_schedule_given_at_once_is_that_of_a_factor_for_each_step() -> None:
    """Also once members are dropped, and loaded; past its end, the last factors stay."""
    table = [[1.0, 0.5, 0.2, 0.1], [0.5, 0.4, 0.3, 0.2], [0.1, 0.9, 0.8, 0.7]]
    torch.manual_seed(0)
    modules = [mlp() for _ in range(K)]
    ends = []
    for at_once in (True, False):
        fused = fuse(modules)
        opt = fused_optimizer(fused, CONFIGS["adamw"])
        if at_once:
            opt.schedule(table)
        for step, row in enumerate([*table, table[-1]]):
            if step == 2:
                fused.keep([3, 1])
                opt.keep([3, 1])
                state = opt.state_dict()
                opt = fused_optimizer(fused, CONFIGS["adamw"][:2])
                opt.load_state_dict(state)
            if not at_once:
                opt.set_lr_factor(row if step < 2 else [row[3], row[1]])
            for name, p in fused.stacked.items():
                p.grad = gradients(modules[0], step)[name][: fused.K]
            opt.step()
        ends.append(fused.stacked)
    assert all(torch.equal(ends[0][name], p) for name, p in ends[1].items())
    with pytest.raises(ValueError, match=r"`factors` is \[1, 3\], but must be \[S, 2\]"):
        opt.schedule([[1.0, 1.0, 1.0]])


def test_a_schedule_given_again_is_the_one_of_a_fresh_optimizer() -> None:
    """It begins at its first row, whether it has as many rows as the one before, which was not at its end, or fewer."""
    tables = [[1.0, 0.5, 0.2, 0.1], [0.5, 0.4, 0.3, 0.2]], [[0.3, 0.9, 0.8, 0.7], [0.6, 0.1, 0.4, 0.9]], [[0.2] * K]
    torch.manual_seed(0)
    module = mlp()
    ends = []
    for fresh in (False, True):
        fused = fuse([module] * K)
        opt = fused_optimizer(fused, CONFIGS["adamw"])
        for at, (table, steps) in enumerate(zip(tables, (1, 2, 1))):
            if fresh:
                state = {**opt.state_dict(), "schedule": None}
                opt = fused_optimizer(fused, CONFIGS["adamw"])
                opt.load_state_dict(state)
            opt.schedule(table)
            for step in range(steps):
                for name, p in fused.stacked.items():
                    p.grad = gradients(module, 2 * at + step)[name]
                opt.step()
        ends.append(fused.stacked)
    assert all(torch.equal(ends[0][name], p) for name, p in ends[1].items())


def test_members_are_updated_as_many_at_a_time_as_a_chunk_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    apply = Tile._apply

    def noting(self: Tile, stored: Any, *more: Any) -> None:
        taken.append(len(stored[0]))
        apply(self, stored, *more)

    monkeypatch.setattr(Tile, "_apply", noting)
    monkeypatch.setattr(native, "takes", lambda tensors: False)
    fused = fuse([nn.Linear(4, 2, bias=False) for _ in range(K)])
    optimizer = fused_optimizer(fused, CONFIGS["adamw"])
    fused.map(lambda model, x: model(x).sum(), torch.ones(1, 4)).sum().backward()
    monkeypatch.setattr("fusion.optim.vectorized.chunk", lambda device: 3 * 8 + 1)
    optimizer.step()
    assert taken == [3, 1]
