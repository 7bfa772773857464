"""Tasks on small tables, which a wide model overfits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.tasks.task import Batch, Config, Task, held


def breast_cancer(data: Path, reduced: bool) -> Task:
    """scikit-learn's breast cancer, an MLP 30-256-256-2, by its loss; 150 to train on, few enough to overfit."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    parts = _split(torch.tensor(features), torch.tensor(labels), 150, 209)
    return _tabular("breast_cancer", "token", parts, outputs=2, trials=64)


def diabetes(data: Path, reduced: bool) -> Task:
    """scikit-learn's diabetes, a regression by an MLP 10-256-256-1 of few trials; 242 to train on."""
    from sklearn.datasets import load_diabetes

    features, target = load_diabetes(return_X_y=True)
    scaled = _scaled(torch.tensor(target)[:, None], len(target)).float()
    parts = _split(torch.tensor(features), scaled, 242, 100)
    return _tabular("diabetes", "field", parts, outputs=1, trials=32)


def _split(features: Tensor, target: Tensor, train: int, validation: int) -> list[Batch]:
    """Shuffled, features scaled by the training part: (inputs, targets) to train on, to validate and to test."""
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(0))
    sizes = [train, validation, len(order) - train - validation]
    x = _scaled(features[order], train).float()
    return list(zip(x.split(sizes), target[order].split(sizes)))


def _scaled(values: Tensor, count: int) -> Tensor:
    """To mean 0 and standard deviation 1 of the first `count` rows."""
    known = values[:count]
    return (values - known.mean(0)) / known.std(0)


def _tabular(name: str, kind: Any, parts: list[Batch], *, outputs: int, trials: int) -> Task:
    train, validation, test = parts
    inputs = train[0].shape[1]

    def mlp(config: Config, width_ratio: float) -> nn.Module:
        width = int(256 * width_ratio)
        hidden = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))
        return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), *hidden)

    return Task(
        name=name,
        model_fn=mlp,
        kind=kind,
        train=train,
        held=held(validation, test),
        lr=(1e-4, 1e-1),
        batch_sizes=(16, 32),
        optimizer="adamw",
        num_samples=trials,
        max_t=27,
        reduced=False,
    )
