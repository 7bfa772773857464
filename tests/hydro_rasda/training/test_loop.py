from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydro_rasda import RaceConfig, SweepConfig
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Span
from hydro_rasda.data import Shard, make_batches
from hydro_rasda.problem.metrics import summed
from hydro_rasda.problem.objective import Objective, supervised
from hydro_rasda.problem.problem import Problem
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.training.full_size import full_size_learner
from hydro_rasda.training.loop import keep_best, train_epochs
from tests.hydro_rasda.ranks import on_ranks

Pair = tuple[Tensor, Tensor]

SCHEDULE: dict[str, Any] = {"schedule": "cosine", "decay_start": 0.3, "floor": 0.1, "warmup": 0.2}
CONFIG: dict[str, Any] = {"lr": 0.01, "batch_size": 32, "dropout": 0.2, "grad_clip": 1.0, **SCHEDULE}


def test_means_are_over_examples_in_double_precision() -> None:
    measured = [({"loss": torch.tensor([1.0, 2.0])}, 3), ({"loss": torch.tensor([5.0, float("nan")])}, 1)]
    means = summed(measured).means()["loss"]
    assert means.dtype == torch.float64
    torch.testing.assert_close(means, torch.tensor([2.0, float("nan")], dtype=torch.float64), equal_nan=True)
    many = summed(({"loss": torch.tensor(0.1)}, 1) for _ in range(10_000)).means()["loss"]
    assert many.item() == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)


class Noting:
    """Stands in for a learner: notes what it is to remember."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float, bool]] = []

    def remember(self, epoch: int, score: float, mode: str, *, averaged: bool) -> None:
        self.told.append((epoch, score, averaged))


@pytest.mark.parametrize(
    ("averaged", "own", "more", "kept"),
    [
        (0.5, 0.4, {}, "own"),
        (0.4, 0.5, {}, "averaged"),
        (0.5, 0.5, {}, "averaged"),
        (0.5, math.nan, {}, "averaged"),
        (0.5, 0.6, {"mode": "max"}, "own"),
        (0.5, 0.4, {"max_t": 4}, "averaged"),
        (0.5, 0.4, {"objectives": (("val_loss", "min"), ("val_size", "min"))}, "averaged"),
    ],
)
def test_the_better_weights_metrics_count(
    digits: tuple[Pair, Pair], averaged: float, own: float, more: dict[str, Any], kept: str
) -> None:
    """All metrics of an epoch are of the same weights; before the end, these are averaged."""
    train, val = (make_batches(pair, "data", torch.device("cpu"), 0) for pair in digits)
    problem = Problem(*MODELS["linear"], train, val, TuneConfig(**{"max_t": 3} | more), torch.device("cpu"))
    metrics = {"train_loss": [1.0], "val_loss": [averaged], "val_size": [1.0], "val_loss_unaveraged": [own]}
    learner = Noting()
    found = keep_best([learner], problem, 3, metrics | {"val_size_unaveraged": [2.0]})  # type: ignore[list-item]
    counts, size = own, 2.0
    other: dict[str, Any] = {"val_loss_averaged": [averaged]}
    if kept == "averaged":
        counts, size, other = averaged, 1.0, {"val_loss_unaveraged": [pytest.approx(own, nan_ok=True)]}
    if "objectives" in more:
        other["val_size_unaveraged"] = [2.0]
    assert found == {"train_loss": [1.0], "val_loss": [counts], "val_size": [size], **other}
    assert learner.told == [(3, counts, kept == "averaged")]


class Drawing(nn.Module):
    """Says what it draws, normalizes a batch, and leaves out one layer or the other by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 10), nn.Linear(64, 10)
        self.norm = nn.BatchNorm1d(64)
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.training:
            self.drawn.append(torch.rand(()).item())
            y: Tensor = (self.one if self.drawn[-1] < 0.5 else self.other)(x)
            return y
        return self.one(x) + self.other(x)  # type: ignore[no-any-return]


def drawing(config: dict[str, Any]) -> nn.Module:
    return Drawing()


class Watching(nn.Module):
    """All of it is used, the second layer only by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.watched = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.out(x), self.watched(x)


def watching_objective(model: nn.Module, batch: Pair) -> Mapping[str, Tensor]:
    output, watched = model(batch[0])
    return MappingProxyType({"loss": nn.functional.cross_entropy(output, batch[1]), "watched": watched.mean()})


def linear(config: dict[str, Any]) -> nn.Module:
    return nn.Linear(64, 10)


def watching(config: dict[str, Any]) -> nn.Module:
    return Watching()


MODELS: dict[str, tuple[Any, Objective]] = {
    "drawing": (drawing, supervised()),
    "watching": (watching, watching_objective),
    "linear": (linear, supervised()),
    "weighted": (linear, supervised(nn.CrossEntropyLoss(torch.linspace(0.1, 3, 10), label_smoothing=0.1))),
}


def train_on_rank(
    rank: int, world: int, data: tuple[Pair, Pair], kind: str, accumulate: int = 1
) -> tuple[Any, Any, Any]:
    """The trained model, the metrics of three epochs, and the averaged weights."""
    cpu = torch.device("cpu")
    train, val = (make_batches(pair, "data", cpu, 0) for pair in data)
    problem = Problem(
        *MODELS[kind], train, val, TuneConfig(sweep=SweepConfig(surrogate=1), max_t=3, race=RaceConfig(ema=0.1)), cpu
    )
    config = {"lr": 0.1, "optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01, "batch_size": 16}
    trial = Trial(0, {**config, "accumulate": accumulate})
    learner = full_size_learner(problem, trial, Shard(rank, world))
    epochs = train_epochs(learner, problem, Span(0, 3), trial.batch_size, [0])
    history = []
    for epoch, metrics in epochs:
        metrics = keep_best([learner], problem, epoch, metrics)
        history.append((epoch, metrics))
    with learner.evaluating():
        averaged = copy.deepcopy(learner.model.state_dict())
    return learner.model, history, averaged


def test_ranks_agree_though_each_draws_for_itself(digits: tuple[Pair, Pair]) -> None:
    """On weights, on BatchNorm's buffers (each rank saw other examples) and on all metrics."""
    models, histories, averaged = zip(*on_ranks(3, train_on_rank, digits, "drawing"), strict=True)
    assert len({tuple(model.drawn) for model in models}) == 3
    assert histories[0] == histories[1] == histories[2]
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name]), name
        assert torch.equal(value, models[2].state_dict()[name]), name
        assert torch.equal(averaged[0][name], averaged[1][name]), name
    assert histories[0][-1][1]["val_loss"][0] < histories[0][0][1]["val_loss"][0]
    alone, *_ = train_on_rank(0, 1, digits, "drawing")
    assert alone.drawn[:7] == models[0].drawn[:7]  # rank 0 draws as one process does


def test_a_layer_that_only_a_metric_uses_stays_as_it_was(digits: tuple[Pair, Pair]) -> None:
    """As in one process, where it has no gradient: weight decay leaves it alone."""
    alone, *_ = train_on_rank(0, 1, digits, "watching")
    for model, *_ in on_ranks(2, train_on_rank, digits, "watching"):
        assert torch.equal(model.watched.weight, alone.watched.weight)
        assert not torch.equal(model.out.weight, alone.out.weight)  # of another batch size


def test_ranks_of_a_model_that_is_used_as_a_whole(digits: tuple[Pair, Pair]) -> None:
    (_, one, _), (_, other, _) = on_ranks(2, train_on_rank, digits, "linear")
    assert one == other
    assert one[-1][1]["val_loss"][0] < one[0][1]["val_loss"][0]


def ignoring(data: Pair) -> Pair:
    """Most targets do not count, among them all of some ranks' batches."""
    x, y = data
    drawn = torch.rand(len(y), generator=torch.Generator().manual_seed(0))
    return x, y.masked_fill(drawn < 0.8, -100)


@pytest.mark.parametrize(("kind", "accumulate"), [("linear", 1), ("weighted", 1), ("weighted", 3)])
def test_ranks_and_parts_count_by_what_the_loss_is_the_mean_of(
    kind: str, accumulate: int, digits: tuple[Pair, Pair]
) -> None:
    """The last batch is too small for all ranks: two have fillers."""
    train, val = (ignoring(pair) for pair in digits)
    data = (train[0][:307], train[1][:307]), val
    alone, history, _ = train_on_rank(0, 1, data, kind)
    for model, measured, _ in on_ranks(3, train_on_rank, data, kind, accumulate):
        torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=1e-4, atol=1e-6)
        for (epoch, found), (expected_epoch, expected) in zip(measured, history, strict=True):
            assert epoch == expected_epoch
            assert found == {name: pytest.approx(values, rel=1e-4) for name, values in expected.items()}
    names = {f"{part}_{name}" for part in ("train", "val") for name in ("loss", "accuracy")}
    assert history[-1][1].keys() == names | {"val_loss_unaveraged"}
