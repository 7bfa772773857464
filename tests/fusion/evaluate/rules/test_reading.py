"""Numbers read of counters and flags: members compute together while all hold the same."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import FusionWarning, GraphedStep, dry_run, fuse, fused_optimizer
from fusion.graph import GraphWarning
from fusion.optim import optimizer

X, Y = torch.randn(5, 12, 4, dtype=torch.float64), torch.randint(3, (5, 12))
CONFIGS = [{"optimizer": "sgd", "lr": 0.05 * (k + 1)} for k in range(3)]


class Starts(nn.Module):
    """It measures the first batch, and reads a counter and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.measured: Tensor
        self.scale: Tensor
        self.batches: Tensor
        self.register_buffer("measured", torch.tensor(False))
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("batches", torch.tensor([0]))  # as the pointer of a queue, in MoCo

    def forward(self, x: Tensor) -> Tensor:
        if not self.measured:
            self.scale.copy_(x.detach().std(0))
            self.measured.fill_(True)
        self.batches += 1
        return x / self.scale * (1 + 1 / int(self.batches)) + self.batches.item()


def averaged() -> nn.Module:
    return nn.BatchNorm1d(8, momentum=None)


def net(middle: Callable[[], nn.Module], k: int = 0) -> nn.Module:
    torch.manual_seed(k)
    return nn.Sequential(nn.Linear(4, 8), middle(), nn.Tanh(), nn.Linear(8, 3)).double()


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("middle", [averaged, Starts])
def test_members_train_as_alone(middle: Callable[[], nn.Module]) -> None:
    models = [net(middle, k) for k in range(3)]
    fused = fuse([copy.deepcopy(model) for model in models[:2]])
    assert dry_run(fused, loss, (X[0], Y[0])) is None
    last = fuse([copy.deepcopy(models[2])])
    opt, last_opt = fused_optimizer(fused, CONFIGS[:2]), fused_optimizer(last, CONFIGS[2:])

    def train(fused: Any, opt: Any, steps: range) -> None:
        for step in steps:
            opt.zero_grad()
            fused.map(loss, (X[step], Y[step])).sum().backward()
            opt.step()

    train(fused, opt, range(2))
    train(last, last_opt, range(2))
    fused.concat(last)
    opt.concat(last_opt)
    train(fused, opt, range(2, 5))
    assert not fused.one_by_one
    for k, model in enumerate(models):
        alone = optimizer(model, CONFIGS[k])
        for step in range(5):
            alone.zero_grad()
            loss(model, (X[step], Y[step])).backward()
            alone.step()
        torch.testing.assert_close(dict(fused.unfuse(k).state_dict()), dict(model.state_dict()), rtol=0, atol=1e-12)


def test_members_that_have_counted_apart() -> None:
    fused, other = fuse([net(averaged)]), fuse([net(averaged)])
    fused.map(loss, (X[0], Y[0]))
    fused.concat(other)
    with pytest.raises(RuntimeError, match=r"members have counted \[2, 1\]"):
        fused.map(loss, (X[0], Y[0]))
    with pytest.warns(FusionWarning, match=r"members train one after another, .* members have counted"):
        dry_run(fused, loss, (X[0], Y[0]))
    alone = [fused.unfuse(k) for k in range(2)]
    fused.map(loss, (X[1], Y[1]))
    for k, model in enumerate(alone):
        loss(model, (X[1], Y[1]))
        torch.testing.assert_close(dict(fused.unfuse(k).state_dict()), dict(model.state_dict()), rtol=0, atol=1e-12)


def test_numbers_that_depend_on_data_are_no_counters() -> None:
    """Two equal members agree on each batch; others need not."""

    def counted(model: Any, batch: tuple[Tensor, Tensor]) -> Any:
        correct = (model(batch[0]).argmax(1) == batch[1]).sum()
        return loss(model, batch) / (1 + float(correct))

    with pytest.warns(FusionWarning, match="it makes a number of a tensor"):
        dry_run(fuse([net(nn.Identity), net(nn.Identity)]), counted, (X[0], Y[0]))


def test_a_step_that_reads_is_not_recorded() -> None:
    fused = fuse([net(averaged, k) for k in range(3)])
    opt = fused_optimizer(fused, CONFIGS)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        opt.zero_grad()
        loss_K = fused.map(loss, batch)
        loss_K.sum().backward()
        opt.step()
        return cast("Tensor", loss_K.detach())

    graphed = GraphedStep(step, fused, opt, compiled=True)
    with pytest.warns(GraphWarning, match="waits for values of the device"):
        [*map(graphed, [*zip(X, Y)] * 3)]
