"""Tasks on small tables, which a wide model overfits.

The tables have few examples, so the split into validation and test examples matters much. Tasks whose names end in
"splits" therefore have another split for each seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.tasks.task import Batch, Config, Task, held

SPLITS = 15
"""Seeds that are this far apart share a split, so a search can be compared with one that samples anew."""

Parts = Callable[[int], list[Batch]]
"""`parts(split)`: (inputs, targets) to train on, to validate and to test."""


@dataclass(frozen=True)
class SplitTask(Task):
    """A task whose examples are split anew for each of `SPLITS` seeds."""

    parts: Parts = field(kw_only=True)

    def of_seed(self, seed: int) -> Task:
        """See `Task.of_seed`."""
        split = seed % SPLITS
        train, validation, test = self.parts(split)
        return replace(self, split=split, train=train, held=held(validation, test))


def breast_cancer(data: Path, reduced: bool) -> Task:
    """scikit-learn's breast cancer, an MLP 30-256-256-2, by its loss; 150 to train on, few enough to overfit."""
    return _tabular("breast_cancer", "token", _breast_cancer(), outputs=2, trials=64)


def breast_cancer_splits(data: Path, reduced: bool) -> Task:
    """The same as `breast_cancer`, with another split for each seed."""
    parts = _breast_cancer()
    return _tabular("breast_cancer_splits", "token", parts, outputs=2, trials=64, of=partial(SplitTask, parts=parts))


def diabetes(data: Path, reduced: bool) -> Task:
    """scikit-learn's diabetes, a regression by an MLP 10-256-256-1 of few trials; 242 to train on."""
    return _tabular("diabetes", "field", _diabetes(), outputs=1, trials=32)


def diabetes_splits(data: Path, reduced: bool) -> Task:
    """The same as `diabetes`, with another split for each seed."""
    parts = _diabetes()
    return _tabular("diabetes_splits", "field", parts, outputs=1, trials=32, of=partial(SplitTask, parts=parts))


def wide_table(data: Path, reduced: bool) -> Task:
    """scikit-learn's `make_classification`, 20 of 40 features informative, 1 label in 20 wrong; MLP 40-1024-1024-4."""
    from sklearn.datasets import make_classification

    features, labels = make_classification(
        3000, 40, n_informative=20, n_redundant=10, n_classes=4, n_clusters_per_class=3, flip_y=0.05, random_state=0
    )
    parts = partial(_split, torch.tensor(features), torch.tensor(labels), 2000, 500)
    return replace(
        _tabular("wide_table", "token", parts, outputs=4, trials=48, width=1024),
        batch_sizes=(32, 64),
        choices={"schedule": ["constant", "cosine", "linear"]},
        max_t=9,
    )


def few_rows(data: Path, reduced: bool) -> Task:
    """scikit-learn's `make_friedman1` with noise, a regression by an MLP 10-512-512-1; 100 rows to train on."""
    from sklearn.datasets import make_friedman1

    features, target = make_friedman1(700, noise=1.0, random_state=0)
    scaled = _scaled(torch.tensor(target)[:, None], len(target)).float()
    parts = partial(_split, torch.tensor(features), scaled, 100, 100)
    return _tabular("few_rows", "field", parts, outputs=1, trials=48, width=512)


def _breast_cancer() -> Parts:
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    return partial(_split, torch.tensor(features), torch.tensor(labels), 150, 209)


def _diabetes() -> Parts:
    from sklearn.datasets import load_diabetes

    features, target = load_diabetes(return_X_y=True)
    scaled = _scaled(torch.tensor(target)[:, None], len(target)).float()
    return partial(_split, torch.tensor(features), scaled, 242, 100)


def _split(features: Tensor, target: Tensor, train: int, validation: int, split: int) -> list[Batch]:
    """Shuffle examples, split them, and scale features by the training part."""
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(split))
    sizes = [train, validation, len(order) - train - validation]
    x = _scaled(features[order], train).float()
    return list(zip(x.split(sizes), target[order].split(sizes)))


def _scaled(values: Tensor, count: int) -> Tensor:
    """Scale values so that the first `count` rows have mean 0 and standard deviation 1."""
    known = values[:count]
    return (values - known.mean(0)) / known.std(0)


def _tabular(
    name: str, kind: Any, parts: Parts, *, outputs: int, trials: int, width: int = 256, of: Callable[..., Task] = Task
) -> Task:
    train, validation, test = parts(0)
    inputs = train[0].shape[1]

    def mlp(config: Config, width_ratio: float) -> nn.Module:
        w = int(width * width_ratio)
        hidden = (nn.Linear(w, w), nn.ReLU(), nn.Linear(w, outputs))
        return nn.Sequential(nn.Linear(inputs, w), nn.ReLU(), *hidden)

    given = {"batch_sizes": (16, 32), "num_samples": trials, "max_t": 27}
    return of(name, mlp, kind, train, held(validation, test), **given)
