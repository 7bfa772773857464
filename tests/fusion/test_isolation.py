"""A member that diverges changes no bit of another, and is named; the others are not."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion import FusedModel, clip_grad_norm_, fuse, fused_optimizer
from tests.zoo import CASES, Case

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"optimizer": "sgd", "lr": 0.1}] * 4,
    "momentum": [{"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": k % 2 == 0} for k in range(4)],
    "adam": [{"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1}] * 4,
    "adamw": [{"optimizer": "adamw", "lr": 0.01}] * 4,
    "muon": [{"optimizer": "muon", "lr": 0.01, "nesterov": k % 2 == 0} for k in range(4)],
    "lion": [{"optimizer": "lion", "lr": 0.01}] * 4,
    "prodigy": [{"optimizer": "prodigy", "lr": 1.0, "d0": 1e-3}] * 4,
    "schedule-free": [{"optimizer": "schedule_free_adamw", "lr": 0.01}] * 4,
    "adafactor": [{"optimizer": "adafactor", "lr": 0.1}] * 4,
    "mixed": [
        {"optimizer": "adam", "lr": 0.01},
        {"optimizer": "adamw", "lr": 0.01},
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
        {"optimizer": "sgd", "lr": 0.1},
    ],
    "apart": [{"optimizer": kind, "lr": 0.01} for kind in ("nadam", "rmsprop", "nadam", "sgd")],
}
SICK = 1


def states(fused: FusedModel) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in {**fused.stacked, **fused.stacked_buffers}.items()}


def train(
    case: Case, configs: list[dict[str, Any]], poison: float | None, autocast: bool = False, one_by_one: bool = False
) -> tuple[FusedModel, list[Tensor]]:
    torch.manual_seed(0)
    fused = fuse([case.build().to(DEVICE) for _ in configs], one_by_one=one_by_one)
    opt = fused_optimizer(fused, configs)
    losses = []
    for step in range(4):
        if step == 1 and poison is not None:
            with torch.no_grad():
                for p in fused.stacked.values():
                    p[SICK].fill_(poison)
        opt.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16) if autocast else contextlib.nullcontext():
            loss_K = fused.map(case.objective, [t.to(DEVICE) for t in case.batch(step)])
        loss_K.sum().backward()
        clip_grad_norm_(fused, [0.5, 1.0, float("inf"), 2.0])
        opt.step()
        losses.append(loss_K.detach())
    return fused, losses


def same(ours: Tensor, theirs: Tensor) -> bool:
    """To the last bit; on a GPU, where two equal trainings differ, finite as the other, which no zero times NaN is."""
    return torch.equal(ours, theirs) if DEVICE == "cpu" else bool(torch.isfinite(ours).all())


def assert_only_the_sick_member_changed(
    sick: tuple[FusedModel, list[Tensor]], healthy: tuple[FusedModel, list[Tensor]]
) -> None:
    well = [k for k in range(4) if k != SICK]
    before, after = states(healthy[0]), states(sick[0])
    for name, tensor in before.items():
        assert same(after[name][well], tensor[well]), name
    for ours, theirs in zip(sick[1], healthy[1], strict=True):
        assert same(ours[well], theirs[well])
    assert sick[0].diverged() == [SICK]
    assert healthy[0].diverged() == []


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16-autocast"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_in_every_optimizer(kind: str, autocast: bool) -> None:
    """Of NaN, and of values that overflow."""
    case = next(case for case in CASES if case.name == ("transformer" if kind == "muon" else "batch-norm"))
    healthy = train(case, OPTIMIZERS[kind], None, autocast)
    for poison in (float("nan"), 1e30):
        assert_only_the_sick_member_changed(train(case, OPTIMIZERS[kind], poison, autocast), healthy)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_every_model(case: Case) -> None:
    healthy = train(case, OPTIMIZERS["mixed"], None)
    assert_only_the_sick_member_changed(train(case, OPTIMIZERS["mixed"], float("nan")), healthy)


def test_one_by_one() -> None:
    healthy = train(CASES[0], OPTIMIZERS["adamw"], None, one_by_one=True)
    sick = train(CASES[0], OPTIMIZERS["adamw"], float("nan"), one_by_one=True)
    assert_only_the_sick_member_changed(sick, healthy)


def test_a_learning_rate_that_explodes_is_named() -> None:
    torch.manual_seed(0)
    fused = fuse([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)) for _ in range(4)])
    opt = fused_optimizer(fused, [{"optimizer": "sgd", "lr": lr} for lr in (0.01, 0.02, 1e6, 0.01)])
    x = torch.randn(32, 8)
    for _ in range(30):
        opt.zero_grad()
        fused.map(lambda model, x: F.mse_loss(model(x), x[:, :1]), x).sum().backward()
        opt.step()
    assert fused.diverged() == [2]


def test_a_model_with_an_empty_tensor_is_searched_for_members_that_diverged() -> None:
    models = [nn.Linear(2, 1) for _ in range(3)]
    for model in models:
        model.register_buffer("prompt", torch.empty(0, 4))
    fused = fuse(models)
    with torch.no_grad():
        fused.stacked["bias"][1] = float("inf")
    assert fused.diverged() == [1]


def test_autocast_equals_separate_members() -> None:
    """bfloat16 keeps 8 bits: 2^-8 = 0.004, a few roundings deep."""
    torch.manual_seed(0)
    models = [CASES[0].build() for _ in range(3)]
    fused = fuse(models)
    with torch.autocast("cpu", torch.bfloat16):
        loss_K = fused.map(CASES[0].objective, CASES[0].batch(0))
        alone = torch.stack([CASES[0].objective(model, CASES[0].batch(0)) for model in models])
    torch.testing.assert_close(loss_K, alone, rtol=0.02, atol=0.02)
