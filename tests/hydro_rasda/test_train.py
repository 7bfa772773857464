from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hydro_rasda.data import make_batches
from hydro_rasda.problem import Problem, Trial
from hydro_rasda.train import Span, mean_metrics, train_target

Pair = tuple[Tensor, Tensor]

CONFIG: dict[str, Any] = {"lr": 0.01, "batch_size": 32, "dropout": 0.2, "schedule": "cosine", "grad_clip": 1.0}


def test_means_are_over_examples_in_double_precision() -> None:
    measured = [({"loss": torch.tensor([1.0, 2.0])}, 3), ({"loss": torch.tensor([5.0, float("nan")])}, 1)]
    means = mean_metrics(measured)["loss"]
    assert means.dtype == torch.float64
    torch.testing.assert_close(means, torch.tensor([2.0, float("nan")], dtype=torch.float64), equal_nan=True)
    many = mean_metrics(({"loss": torch.tensor(0.1)}, 1) for _ in range(10_000))["loss"]
    assert many.item() == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)


@pytest.mark.parametrize("optimizer", [{"optimizer": "adamw"}, {"optimizer": "sgd", "momentum": 0.9}])
def test_training_in_spans_is_training_in_one(problem: Problem, optimizer: dict[str, Any]) -> None:
    trial = Trial(5, {**CONFIG, **optimizer})
    whole, history = train_target(problem, trial, Span(0, 4), None)
    state, first = train_target(problem, trial, Span(0, 1), None)
    torch.rand(7)
    state, second = train_target(problem, trial, Span(1, 4), state)
    assert first + second == history
    assert [epoch for epoch, _ in history] == [1, 2, 3, 4]
    for name, value in whole["model"].items():
        assert torch.equal(state["model"][name], value)


def test_it_learns_and_says_so(problem: Problem) -> None:
    told: list[int] = []
    _, history = train_target(
        problem, Trial(0, CONFIG), Span(0, 3), None, on_epoch=lambda epoch, metrics: told.append(epoch)
    )
    assert told == [1, 2, 3]
    assert history[-1][1]["val_loss"] < history[0][1]["val_loss"]
    assert set(history[0][1]) == {"train_loss", "train_accuracy", "val_loss", "val_accuracy"}


def test_it_stops_when_asked_or_diverged(problem: Problem) -> None:
    _, history = train_target(problem, Trial(0, CONFIG), Span(0, 4), None, should_stop=lambda: True)
    assert [epoch for epoch, _ in history] == [1]
    wild = Trial(0, {"lr": 1e30, "optimizer": "sgd", "batch_size": 32})
    _, history = train_target(problem, wild, Span(0, 4), None)
    assert [epoch for epoch, _ in history] == [1]


def test_loaders_without_a_length_train_too(problem: Problem, digits: tuple[Pair, Pair]) -> None:
    (x, y), _ = digits

    def loader(batch_size: int) -> Iterator[Pair]:
        yield from zip(x.split(batch_size), y.split(batch_size))

    streamed = replace(problem, train_data=make_batches(loader, "train_data", problem.device, 0))
    _, history = train_target(streamed, Trial(0, CONFIG), Span(0, 2), None)
    assert history[1][1]["train_loss"] < history[0][1]["train_loss"]
