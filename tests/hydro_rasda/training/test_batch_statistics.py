"""BatchNorm on ranks, where the first layer sees the same examples as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.optim import optimizer
from hydro_rasda.config import TuneConfig
from hydro_rasda.data import Shard, Share
from hydro_rasda.training.batch_statistics import average_statistics
from hydro_rasda.training.learners import SingleLearner
from hydro_rasda.training.worker import Worker
from tests.hydro_rasda.ranks import on_ranks

SAMPLES, BATCH, EPOCHS = 103, 4, 2
MOMENTUM = 0.3


def examples() -> Tensor:
    return 5 + 3 * torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(6, momentum=MOMENTUM), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def statistics(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for name, buffer in model.named_buffers() if name.endswith(("mean", "var"))]


class RankOf(Worker):
    def _deliver(self, *_: Any) -> None:
        pass


def worker(rank: int, world: int) -> Worker:
    job = {"config": {}, "trial": "t", "rank": rank, "world_size": world, "workers": world}
    return RankOf(job, None, torch.device("cpu"))


def by_worker(rank: int, world: int) -> list[Tensor]:
    own, x, model = worker(rank, world), examples(), build()
    joint = own.prepare(model)
    steps = optimizer(model, {"optimizer": "sgd", "lr": 0.01})
    while own.iteration < EPOCHS:
        for batch, weight in own.batches(SAMPLES, BATCH * world, fixed_global=True):
            steps.zero_grad()
            (joint(x[batch]).square().mean() * weight).backward()
            steps.step()
        own.report({"loss": 0.0}, {})
    return statistics(model)


def twice_before_a_backward_pass(rank: int, world: int) -> list[Tensor]:
    model = build()
    joint = nn.Sequential(model)
    average_statistics(joint)
    x = examples()[rank * 50 : rank * 50 + 50]
    (joint(x).sum() + joint(2 * x).sum()).backward()
    return statistics(model)


def objective(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    return {"loss": model(batch).square().mean()}


def by_learner(rank: int, world: int, sharded: bool) -> list[Tensor]:
    model, shard = build(), Shard(rank, world)
    learner = SingleLearner(model, {"lr": 0.01}, objective, TuneConfig().max_t, shard, sharded=sharded)
    learner.train_mode(True)
    for batch in examples().split(BATCH * world):
        part = shard.part(len(batch), least=2)
        learner.step(Share(batch[part.rows], part.examples, part.weight), 0.0, 1.0)
    return statistics(model)


def closed_form(world: int, epochs: int, shuffled: bool) -> list[Tensor]:
    """The first layer's statistics: exponential averages of a global batch's mean, and of its shares' variances."""
    alone, x, mean, variance = worker(0, 1), examples(), torch.zeros(6), torch.ones(6)
    for epoch in range(epochs):
        alone.iteration = epoch
        size = BATCH * world
        batches = [b for b, _ in alone.batches(SAMPLES, size)] if shuffled else torch.arange(SAMPLES).split(size)
        for batch in batches:
            parts = [Shard(rank, world).part(len(batch)) for rank in range(world)]
            variances = [x[batch][part.rows].var(0) * part.weight / world for part in parts]
            mean = (1 - MOMENTUM) * mean + MOMENTUM * x[batch].mean(0)
            variance = (1 - MOMENTUM) * variance + MOMENTUM * torch.stack(variances).sum(0)
    return [mean, variance]


@pytest.mark.parametrize("world", [2, 3])
def test_statistics_are_those_of_all_ranks_examples(world: int) -> None:
    """103 examples leave a last batch that ranks share unevenly."""
    first, *others = on_ranks(world, by_worker)
    assert all(torch.equal(one, two) for other in others for one, two in zip(first, other))
    torch.testing.assert_close(first[:2], closed_form(world, EPOCHS, shuffled=True))


@pytest.mark.parametrize("sharded", [False, True])
def test_those_of_tune_are(sharded: bool) -> None:
    first, second = on_ranks(2, by_learner, sharded)
    assert all(torch.equal(one, two) for one, two in zip(first, second))
    torch.testing.assert_close(first[:2], closed_form(2, 1, shuffled=False))


def test_a_graph_of_two_forward_passes_is_left_whole() -> None:
    first, second = on_ranks(2, twice_before_a_backward_pass)
    assert all(torch.equal(one, two) for one, two in zip(first, second))
