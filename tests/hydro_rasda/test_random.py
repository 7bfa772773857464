"""A trial's random numbers are its own: the same alone, in any group at any place, one by one, and at full size."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hydro_rasda import LocalBackend, RaceConfig, SweepConfig, TuneResult, loguniform, tune
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Group, Span, Task, full_size_task
from hydro_rasda.data import make_batches
from hydro_rasda.problem.problem import Problem
from hydro_rasda.training.full_size import train_full_size_trial
from hydro_rasda.training.group_training import train_group
from tests.hydro_rasda.models import mlp

EPOCHS = 2
TRIALS = {n: Trial(n, {"optimizer": "sgd", "lr": 0.1 + 0.1 * n, "batch_size": 64, "dropout": 0.5}) for n in range(4)}


class Sequences(nn.Module):
    """Digits as sequences of 8 rows, read by a layer that draws."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        states = self.layer(x.unflatten(1, (8, 8)))
        logits: Tensor = self.out((states[0] if isinstance(states, tuple) else states).mean(1))
        return logits


class Noisy(nn.Module):
    """A linear classifier of what a function makes of its inputs."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.out, self.noise = nn.Linear(64, 10), noise

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.noise(x) if self.training else x)
        return logits


def of_numpy(x: Tensor) -> Tensor:
    return x + torch.as_tensor(np.random.rand(64), dtype=x.dtype) + random.random()


MODELS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "mlp": mlp,
    "lstm": lambda config: Sequences(nn.LSTM(8, 8, 2, dropout=config["dropout"], batch_first=True)),
    "transformer": lambda config: Sequences(nn.TransformerEncoderLayer(8, 2, 16, config["dropout"], batch_first=True)),
    "noise": lambda config: Noisy(lambda x: x + torch.rand_like(x)),
    "stochastic depth": lambda config: Noisy(lambda x: x * (torch.rand(()) < 0.5)),
    "numpy": lambda config: Noisy(of_numpy),
}


def losses(problem: Problem, members: tuple[int, ...], fused: bool = True) -> Mapping[int, list[float]]:
    """Training and validation losses of each trial, over the epochs."""
    task = Task("a task", (Group("kind", members, fused),), (), Span(0, EPOCHS))
    outcome = train_group(problem, TRIALS, task, lambda key: {})
    assert outcome.failures == {}
    return {n: flat(history) for n, history in outcome.history.items()}


def flat(history: Any) -> list[float]:
    return [metrics[name] for _, metrics in history for name in ("train_loss", "val_loss")]


def at_full_size(problem: Problem, number: int) -> list[float]:
    outcome = train_full_size_trial(
        problem, TRIALS[number], full_size_task("a task", number, Span(0, EPOCHS), None, problem.settings.seed), None
    )
    assert outcome.error is None
    return flat(outcome.epochs)


@pytest.mark.filterwarnings("ignore::fusion.FusionWarning")
@pytest.mark.parametrize("model", MODELS)
def test_a_trial_draws_the_same_wherever_it_trains(problem: Problem, model: str) -> None:
    problem = replace(problem, model_fn=MODELS[model]).with_settings(sweep=SweepConfig(surrogate=1))
    alone = at_full_size(problem, 2)
    for members, fused in (((0, 1, 2, 3), True), ((2, 0), True), ((3, 2), False), ((2,), False)):
        assert losses(problem, members, fused)[2] == pytest.approx(alone, rel=1e-3), members
    other = at_full_size(problem.with_settings(seed=1), 2)
    assert other != pytest.approx(alone, rel=1e-3)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Examples with noise from every generator."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + torch.rand(64) + random.random() + np.random.rand(), self.y[i]


def test_a_trial_sees_the_same_augmented_data_wherever_it_trains(problem: Problem, digits: Any) -> None:
    train, val = (make_batches(Augmented(*pair), "data", problem.device, 0) for pair in digits)
    problem = replace(problem, train_data=train, val_data=val).with_settings(sweep=SweepConfig(surrogate=1))
    alone = at_full_size(problem, 1)
    for members in ((0, 1, 3), (1,)):
        assert losses(problem, members)[1] == pytest.approx(alone, rel=1e-3)


@pytest.fixture
def normalizing(problem: Problem, digits: Any) -> Iterator[Problem]:
    """An objective that normalizes in place, a first layer that rectifies in place: the data must stay as they were."""

    def objective(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        inputs = batch[0].sub_(0.5).mul_(2)
        return {"loss": nn.functional.cross_entropy(model(inputs), batch[1])}

    def rectifying(config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 10))

    data = [[t.clone() for t in pair] for pair in digits]
    train, val = (make_batches(pair, "data", problem.device, 0) for pair in data)
    changed = replace(problem, model_fn=rectifying, objective=objective, train_data=train, val_data=val)
    yield changed.with_settings(sweep=SweepConfig(surrogate=1))
    for pair, before in zip(data, digits):
        for tensor, was in zip(pair, before):
            assert torch.equal(tensor, was)


def test_data_that_an_objective_writes_into_stay_as_they_are(normalizing: Problem) -> None:
    alone = at_full_size(normalizing, 1)
    for members, fused in (((0, 1, 2), True), ((2, 1), False), ((1,), False)):
        assert losses(normalizing, members, fused)[1] == pytest.approx(alone, rel=1e-3)


@pytest.mark.usefixtures("one_process")
def test_the_journal_names_the_groups_that_trained(quick: Callable[..., TuneResult]) -> None:
    space = {"lr": loguniform(1e-3, 0.3), "dropout": 0.5}
    result = quick(space=space, sweep=SweepConfig(fusion=2), num_samples=5, race=RaceConfig(top_k=1), max_t=2)
    lines = [json.loads(line) for line in (result.path / "journal.jsonl").read_text().splitlines()]
    units = [line["value"] for line in lines if "/group-" in line.get("key", "")]
    assert {n for unit in units for group in unit["groups"] for n in group} == set(range(5))
    assert max(len(group) for unit in units for group in unit["groups"]) == 2
    assert all(sorted(n for group in unit["groups"] for n in group) == sorted(unit["members"]) for unit in units)


def test_who_loads_a_dataset_changes_nothing(
    digits: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    """Each trial's processes load ahead, in forked children and in this process."""
    train, val = (Augmented(*pair) for pair in digits)
    space = {"lr": loguniform(1e-3, 1e-1), "batch_size": 64}
    found = [
        tune(
            mlp,
            space,
            train_data=train,
            val_data=val,
            num_samples=3,
            max_t=2,
            race=RaceConfig(top_k=1),
            backend=LocalBackend(loader_workers=workers),
            storage_path=tmp_path,
            name=f"{workers}",
            progress=False,
        )
        for workers in (0, 1)
    ]
    assert found[0].best_metric == found[1].best_metric
    assert [record.history for record in found[0].trials] == [record.history for record in found[1].trials]
