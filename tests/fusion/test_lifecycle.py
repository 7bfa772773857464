"""Members come and go in any order, and stay what they would be alone: random lives against separate runs."""

import io
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusedModel, FusedOptimizer, clip_grad_norm_, fuse, fused_optimizer, optimizer
from tests.zoo import CLASSES, classify

CONFIGS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "slope": 0.1, "grad_clip": 0.5},
    {"optimizer": "sgd", "lr": 0.2, "weight_decay": 0.01, "slope": 0.2, "grad_clip": 1e9},
    {"optimizer": "adam", "lr": 0.01, "beta1": 0.8, "slope": 0.1, "grad_clip": 0.1},
    {"optimizer": "adamw", "lr": 0.02, "weight_decay": 0.3, "slope": 0.3, "grad_clip": float("inf")},
]


@dataclass
class Alone:
    """A member's twin, trained by itself."""

    config: dict[str, Any]
    model: nn.Module
    opt: torch.optim.Optimizer
    steps: int = 0

    def train(self, batch: tuple[Tensor, Tensor]) -> None:
        self.steps += 1
        for group in self.opt.param_groups:
            group["lr"] = self.config["lr"] / self.steps
        self.opt.zero_grad()
        classify(self.model, batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config["grad_clip"])
        self.opt.step()


def newborn(rng: random.Random) -> Alone:
    config = rng.choice(CONFIGS)
    layers = (nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.LeakyReLU(config["slope"]), nn.Linear(6, CLASSES))
    model = nn.Sequential(*layers).double()
    return Alone(config, model, optimizer(model, config))


def group(rng: random.Random) -> tuple[FusedModel, FusedOptimizer, list[Alone]]:
    twins = [newborn(rng) for _ in range(rng.randint(1, 4))]
    fused = fuse([twin.model for twin in twins])
    return fused, fused_optimizer(fused, [twin.config for twin in twins]), twins


def train(fused: FusedModel, opt: FusedOptimizer, twins: list[Alone], batch: tuple[Tensor, Tensor]) -> None:
    for twin in twins:
        twin.train(batch)
    opt.set_lr_factor([1 / twin.steps for twin in twins])
    opt.zero_grad()
    fused.map(classify, batch).sum().backward()
    clip_grad_norm_(fused, [twin.config["grad_clip"] for twin in twins])
    opt.step()


def reborn(fused: FusedModel, opt: FusedOptimizer) -> tuple[FusedModel, FusedOptimizer]:
    """Saved, and loaded into a group of other weights."""
    file = io.BytesIO()
    torch.save((fused.state_dict(), opt.state_dict()), file)
    file.seek(0)
    model_state, opt_state = torch.load(file, weights_only=True)
    again = fuse([fused.unfuse(k) for k in range(fused.K)])
    for p in again.parameters():
        nn.init.zeros_(p)
    resumed = fused_optimizer(again, [{"lr": 1.0}] * fused.K)
    again.load_state_dict(model_state)
    resumed.load_state_dict(opt_state)
    return again, resumed


@pytest.mark.parametrize("one_by_one", [False, True], ids=["fused", "one-by-one"])
@pytest.mark.parametrize("seed", range(5))
def test_a_random_life(seed: int, one_by_one: bool) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    fused, opt, twins = group(rng)
    for _ in range(15):
        fused.one_by_one = one_by_one
        event = rng.choice(["train", "train", "keep", "concat", "reload"])
        if event == "train":
            train(fused, opt, twins, (torch.randn(9, 8, dtype=torch.double), torch.randint(CLASSES, (9,))))
        elif event == "keep":
            chosen = rng.sample(range(fused.K), rng.randint(1, fused.K))
            fused.keep(chosen)
            opt.keep(chosen)
            twins = [twins[k] for k in chosen]
        elif event == "concat":
            other, other_opt, others = group(rng)
            train(other, other_opt, others, (torch.randn(9, 8, dtype=torch.double), torch.randint(CLASSES, (9,))))
            fused.concat(other)
            opt.concat(other_opt)
            twins = twins + others
        else:
            fused, opt = reborn(fused, opt)
    assert fused.K == opt.K == len(twins)
    for k, twin in enumerate(twins):
        torch.testing.assert_close(dict(fused.unfuse(k).state_dict()), dict(twin.model.state_dict()))
