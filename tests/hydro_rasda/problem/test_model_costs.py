"""Closed forms of parameters and multiply-accumulates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydro_rasda.common.trial import Trial
from hydro_rasda.data import make_batches
from hydro_rasda.problem.model_costs import BESIDE_A_STEP, model_costs, weight_bytes
from hydro_rasda.problem.objective import supervised
from hydro_rasda.problem.problem import Problem
from hydro_rasda.settings.objectives import COSTS

CPU = torch.device("cpu")


def costs(problem: Problem, model_fn: Callable[..., nn.Module], x: Tensor, names: Any = ("params", "macs")) -> Any:
    data = make_batches((x, torch.zeros(len(x), dtype=torch.int64)), "data", CPU, 0)
    own = replace(problem, model_fn=model_fn, objective=supervised(), train_data=data, val_data=data)
    return model_costs(own, Trial(0, {"lr": 0.1, "batch_size": 8}), names)


def test_an_mlp(problem: Problem) -> None:
    def model_fn(config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 10))

    found = costs(problem, model_fn, torch.zeros(20, 64))
    assert found == {"params": 65 * 32 + 2 * 32 + 33 * 10, "macs": 64 * 32 + 32 * 10}


def test_convolutions(problem: Problem) -> None:
    def model_fn(config: Any) -> nn.Module:
        grouped = nn.Conv2d(16, 16, 3, groups=16, padding=1)
        return nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2), grouped, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
        )

    found = costs(problem, model_fn, torch.zeros(20, 3, 11, 11))
    places = 4 * 4
    assert found["macs"] == places * (3 * 25 * 16 + 9 * 16) + 16 * 10


class Attends(nn.Module):
    """A layer of a transformer over 6 tokens of 8, whose fused kernels no counter sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(x)[:, 0])
        return y


def test_attention(problem: Problem) -> None:
    found = costs(problem, lambda config: Attends(), torch.zeros(20, 6, 8))
    projections, attended, mlp = 4 * 6 * 8 * 8, 2 * 6 * 6 * 8, 2 * 6 * 8 * 16
    assert found["macs"] == projections + attended + mlp + 8 * 10
    assert torch.backends.mha.get_fastpath_enabled()


class Recurrent(nn.Module):
    """8 steps of 8 values -> 16 units -> 10."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x.reshape(-1, 8, 8))[0][:, -1])
        return y


def test_recurrent_layers(problem: Problem) -> None:
    """The operations of oneDNN and cuDNN for them are not counted by torch."""
    found = costs(problem, lambda config: Recurrent(), torch.randn(4, 64))
    assert found["macs"] == 8 * 4 * 16 * (8 + 16) + 16 * 10


def test_a_surrogate(problem: Problem) -> None:
    """Of a width that is not the sweep's."""
    assert model_costs(problem, Trial(0, {}), ["macs"], 1 / 4)["macs"] == 64 * 8 + 8 * 8 + 8 * 10


def test_memory_grows_with_the_weights_and_time_is_measured(problem: Problem) -> None:
    def model_fn(width: int) -> Callable[..., nn.Module]:
        return lambda config: nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    narrow, wide = (costs(problem, model_fn(width), torch.zeros(20, 64), COSTS) for width in (8, 512))
    assert tuple(narrow) == COSTS
    weights = weight_bytes(model_fn(512)({}))
    assert wide["peak_memory"] >= BESIDE_A_STEP * weights > narrow["peak_memory"]
    assert narrow["seconds_per_example"] > 0


def test_an_unknown_cost_is_not_measured(problem: Problem) -> None:
    with pytest.raises(KeyError):
        costs(problem, lambda config: nn.Linear(64, 10), torch.zeros(20, 64), ("val_loss",))
