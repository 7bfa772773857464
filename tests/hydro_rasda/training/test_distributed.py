"""Ranks find each other and share BatchNorm statistics."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusion.optim import optimizer
from hydro_rasda import RaceConfig
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Span, full_size_task
from hydro_rasda.data import Shard, Share
from hydro_rasda.problem.problem import OwnLoop, Problem
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.training import distributed
from hydro_rasda.training.distributed import Store, average_statistics, await_joined
from hydro_rasda.training.full_size import full_size_learner
from hydro_rasda.training.single_learner import SingleLearner
from hydro_rasda.training.user_loop import Over, SpanWorker, train_own_on_rank
from hydro_rasda.training.worker import Worker
from tests.hydro_rasda.backends.ray.test_ddp import (
    CONFIGS,
    MAX_T,
    assert_same,
    ending_at,
    one_process,
    problem,
    rank_reports,
)
from tests.hydro_rasda.ranks import on_ranks

NAMES = ("clipped", "schedule-free", "by part")
"""The last has three optimizers."""
MORE_NAMES = ("sgd", "adamw", "lion", "prodigy")
MUON = {"optimizer": "muon", "lr": 0.02, "batch_size": 8}
CASES = {**CONFIGS, "accumulated": {**CONFIGS["adamw"], "accumulate": 2}, "muon": MUON}
CASES["by part"] = {**CONFIGS["adamw"], "optimizer.out": "sgd", "momentum.out": 0.9, "optimizer.layers.1": "prodigy"}


def new_store() -> Store:
    return dist.HashStore()  # type: ignore[attr-defined]  # not exported


def order_of_joining(last: int, world: int) -> list[int]:
    """Let rank 1 wait while all others but `last` have joined; return the ranks in the order in which they go on."""
    store, order = new_store(), list[int]()

    def other() -> None:
        await_joined(store, 1, world)
        order.append(1)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other)
        store.wait(["joined1"])
        for rank in {*range(world)} - {1, last}:
            store.set(f"joined{rank}", "")
        order.append(last)
        await_joined(store, last, world)
        waiting.result()
    return order


def test_no_rank_trains_before_all_have_joined() -> None:
    assert order_of_joining(last=0, world=2) == [0, 1]


def test_a_rank_waits_for_all_others_and_not_for_rank_0_alone() -> None:
    assert order_of_joining(last=2, world=3) == [2, 1]


def test_a_rank_goes_on_if_the_one_that_holds_the_store_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "ARRIVAL", timedelta(milliseconds=1))
    await_joined(new_store(), 1, 2)
    with pytest.raises(dist.DistStoreError, match="timeout"):
        await_joined(new_store(), 0, 2)


class Layers(nn.Module):
    """Doubles; two layers in a list, a buffer, and a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.out, self.unused = nn.Linear(5, 3), nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([True, True, False]))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: Tensor = self.out(x) * self.mask
        return y


def layers(config: dict[str, Any]) -> nn.Module:
    return Layers()


def split_problem() -> Problem:
    return replace(problem(), model_fn=layers).with_settings(race=RaceConfig(strategy="fsdp"))


def trained(rank: int, world: int, max_t: int, name: str, checkpoint: str | None, workers: int) -> Any:
    job = {"workers": workers, "checkpoint": checkpoint}
    return rank_reports(rank, world, ending_at(max_t, split_problem()), CASES[name], job)


def parts(rank: int, world: int) -> Any:
    """Of one learner, how large its own and the whole parameters are, and whether its state is whole."""
    learner = full_size_learner(split_problem(), Trial(0, CASES["adamw"]), Shard(rank, world))
    parameters = [p for p in learner.model.parameters() if isinstance(p, DTensor)]
    sizes = sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)
    state = learner.state()["model"]
    return sizes, {name: None if value is None else value.shape for name, value in state.items()}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_NAMES)])
def test_ranks_that_split_a_model_train_as_one_process(world: int, name: str) -> None:
    (reports, (saved,)), *others = on_ranks(world, trained, MAX_T, name, None, world)
    history, weights = one_process(split_problem(), CASES[name], [(Span(0, MAX_T), 1)])
    assert_same(reports, history)
    assert saved["state"]["model"].keys() == weights.keys()
    for parameter, value in weights.items():
        torch.testing.assert_close(saved["state"]["model"][parameter], value, rtol=1e-11, atol=1e-13)
    assert others == [([], [])] * (world - 1)


class Normalized(nn.Module):
    """Has statistics, which are not split, and a layer that comes twice in a list."""

    def __init__(self) -> None:
        super().__init__()
        twice = nn.Linear(5, 5)
        self.normed, self.layers, self.out = nn.BatchNorm1d(5), nn.ModuleList([twice, twice]), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: Tensor = self.out(x)
        return y


def normalized(config: dict[str, Any]) -> nn.Module:
    return Normalized()


def trained_normalized(rank: int, world: int, strategy: Any) -> Any:
    what = replace(split_problem(), model_fn=normalized).with_settings(race=RaceConfig(strategy=strategy))
    return rank_reports(rank, world, what, CASES["adamw"], {})[0]


def test_split_models_with_statistics_and_shared_layers_are_averaged_as_whole_ones() -> None:
    split, whole = (on_ranks(2, trained_normalized, strategy)[0] for strategy in ("fsdp", "ddp"))
    assert [report["val_loss"] for report in split] == pytest.approx([report["val_loss"] for report in whole], rel=1e-9)
    assert len(split) == MAX_T


class Words(nn.Module):
    """Gradients of its embedding may be sparse."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(8, 5, sparse=sparse), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.words((4 * x).long().clamp(-4, 3) + 4).mean(1))
        return y


def trained_words(rank: int, world: int, sparse: bool) -> Any:
    return rank_reports(rank, world, replace(problem(), model_fn=lambda config: Words(sparse)), CASES["sgd"], {})[0]


def test_sparse_gradients_are_averaged_and_measured_as_dense_ones() -> None:
    timed = {"epoch_seconds": 0.0, "scaling_efficiency": 0.0}
    sparse, dense = (on_ranks(2, trained_words, kind)[0] for kind in (True, False))
    for found, expected in zip(sparse, dense, strict=True):
        assert {**found, **timed} == pytest.approx({**expected, **timed}, rel=1e-9)
    assert "gradient_noise_scale" in sparse[-1]


@pytest.mark.slow
def test_muon_on_ranks_that_split_a_model_is_that_of_one_process() -> None:
    """To the rounding of its bfloat16: sharded products add up in another order."""
    (reports, (saved,)), _ = on_ranks(2, trained, MAX_T, "muon", None, 2)
    history, weights = one_process(split_problem(), MUON, [(Span(0, MAX_T), 1)])
    assert reports[-1]["val_loss"] == pytest.approx(history[-1]["val_loss"], rel=1e-2)
    before = dict(split_problem().target(Trial(5, MUON)).named_parameters())
    for parameter, first in before.items():
        moved = (weights[parameter] - first).abs().max().item()
        torch.testing.assert_close(saved["state"]["model"][parameter], weights[parameter], rtol=0, atol=0.05 * moved)


@pytest.mark.slow
def test_a_split_model_is_resized_at_a_checkpoint_and_by_either_strategy(tmp_path: Path) -> None:
    """From two ranks to four with twice the batch; its checkpoint is that of a model that is not split."""
    first, saved = on_ranks(2, trained, 1, "adamw", None, 2)[0]
    torch.save(saved[-1], tmp_path / "worker.pt")
    second, (last,) = on_ranks(4, trained, MAX_T, "adamw", str(tmp_path), 2)[0]
    history, weights = one_process(split_problem(), CASES["adamw"], [(Span(0, 1), 1), (Span(1, MAX_T), 2)])
    assert_same(first + second, history)
    alone = full_size_learner(split_problem(), Trial(5, CASES["adamw"]))
    alone.load(last["state"])
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-11, atol=1e-13)


def test_each_rank_holds_its_part_alone_and_rank_0_saves_the_whole() -> None:
    (sizes, whole), (others, none) = on_ranks(2, parts)
    assert sizes[1] == others[1] == sum(p.numel() for p in Layers().parameters())
    assert sizes[0] + others[0] == sizes[1]
    assert 0.3 < sizes[0] / sizes[1] < 0.8
    assert whole == {name: value.shape for name, value in Layers().state_dict().items()}
    assert set(none.values()) == {None}


def test_float16_and_accumulation_are_refused_with_it() -> None:
    with pytest.raises(ValueError, match=r"`accumulate` is 2, but must be 1 with race.strategy 'fsdp'"):
        full_size_learner(split_problem(), Trial(0, CASES["accumulated"]), Shard(0, 2))
    with pytest.raises(ValueError, match=r"`precision` is 'fp16', but must be another one with race.strategy 'fsdp'"):
        TuneConfig(precision="fp16", race=RaceConfig(strategy="fsdp"))
    with pytest.raises(ValueError, match=r"`race.strategy` is 'zero', but must be .*ddp.*fsdp"):
        RaceConfig(strategy="zero")  # type: ignore[arg-type]


def left_by_rank_0(rank: int, world: int) -> tuple[int, bool, list[int]]:
    """Of a training function that would report forever: the epochs of a rank, whether it was left, its history."""

    def reports(worker: Worker) -> None:
        while worker.iteration < 10:
            worker.report({"val_loss": 0.5}, {"model": {}})

    task = full_size_task("key", 0, Span(0, MAX_T), None, 0)
    own = replace(problem(), own_loop=OwnLoop(reports, None))
    asked = lambda: rank > 0  # noqa: E731
    worker = SpanWorker(own, Trial(0, {"lr": 0.1}), task, None, asked, lambda *_: None, Shard(rank, world))
    with contextlib.suppress(Over):
        train_own_on_rank(worker)
    return worker.iteration, worker.left, [epoch for epoch, _ in worker.history]


def test_all_ranks_leave_a_training_function_when_rank_0_does() -> None:
    """The other ranks keep no history, and are not asked whether time is up."""
    assert on_ranks(2, left_by_rank_0) == [(MAX_T, True, [*range(1, MAX_T + 1)]), (MAX_T, True, [])]


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
