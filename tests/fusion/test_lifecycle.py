"""Members come and go in any order, and stay what they would be alone: random lives against separate runs."""

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusedModel, FusedOptimizer, clip_grad_norm_, fuse, fused_optimizer
from fusion.optim import optimizer
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


class Adapted(nn.Module):
    """Trained weights, a frozen base and running statistics, as a state holds; dropout; a float that is its own."""

    def __init__(self, slope: float, base: nn.Module) -> None:
        super().__init__()
        self.base, self.own, self.norm = base, nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.last = nn.Sequential(nn.LeakyReLU(slope), nn.Dropout(0.3), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.base(x) + self.own(x)))
        return out


@pytest.mark.parametrize("bases", [1, 2, 6], ids=["one-base", "one-base-of-the-kept", "own-bases"])
@pytest.mark.parametrize("config", CONFIGS, ids=["nesterov", "sgd", "adam", "adamw"])
def test_some_members_of_a_state_go_on_as_if_all_had_been_loaded(config: dict[str, Any], bases: int) -> None:
    def build(members: Sequence[int], seed: int) -> tuple[FusedModel, FusedOptimizer]:
        torch.manual_seed(seed)
        frozen = [nn.Linear(8, 8).requires_grad_(False) for _ in range(bases)]
        fused = fuse([Adapted(0.1 * (k + 1), frozen[k % bases]) for k in members])
        return fused, fused_optimizer(fused, [{**config, "lr": config["lr"] / (k + 1)} for k in members])

    def go_on(fused: FusedModel, opt: FusedOptimizer, epoch: int) -> Tensor:
        torch.manual_seed(epoch)
        fused.seed(range(fused.K))
        losses = []
        for step in range(3):
            opt.set_lr_factor([1 / (1 + step + k) for k in range(fused.K)])
            opt.zero_grad()
            losses.append(fused.map(classify, (torch.randn(9, 8), torch.randint(CLASSES, (9,)))))
            losses[-1].sum().backward()
            opt.step()
        return torch.stack(losses)

    fused, opt = build(range(6), seed=0)
    go_on(fused, opt, 0)
    kept = [4, -4]
    sliced, its_opt = build([4, 2], seed=1)
    sliced.load_state_dict(fused.state_dict(), members=kept)
    its_opt.load_state_dict(opt.state_dict(), members=kept)
    whole, whole_opt = build([4, 4, 2, 2, 4, 2], seed=2)
    whole.load_state_dict(fused.state_dict())
    whole_opt.load_state_dict(opt.state_dict())
    whole.keep(kept)
    whole_opt.keep(kept)

    assert torch.equal(go_on(sliced, its_opt, 1), go_on(whole, whole_opt, 1))
    assert sliced.shared.keys() == whole.shared.keys()
    same = partial(torch.testing.assert_close, rtol=0, atol=0)
    same(dict(sliced.state_dict()), dict(whole.state_dict()))
    ours, theirs = its_opt.state_dict(), whole_opt.state_dict()
    assert ours.pop("members") == theirs.pop("members")
    assert ours.pop("names") == theirs.pop("names")
    same(ours, theirs)


def test_members_to_load_are_checked() -> None:
    fused, opt, _ = group(random.Random(0))
    for part in (fused, opt):
        with pytest.raises(IndexError, match=f"{fused.K}"):
            part.load_state_dict(part.state_dict(), members=[fused.K])
    with pytest.raises(ValueError, match=f"`state_dict` has {fused.K + 1} members, but must have {fused.K}"):
        opt.load_state_dict(opt.state_dict(), members=[0] * (fused.K + 1))
    with pytest.raises(RuntimeError, match="size mismatch"):
        fused.load_state_dict(fused.state_dict(), members=[0] * (fused.K + 1))
