"""A task of the benchmarks: real data, a model that takes a width ratio, and its search space.

Every method scores a model on validation and test examples at once, after every epoch. Batches of `held` are
`(inputs, target, weights)`, with `weights` [N, 2]. The mean of (score x first column) over all examples is the mean
score of the validation part. With the second column, it is that of the test part. Searches see only the validation
score. Comparisons are drawn from the test score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Config = dict[str, Any]
Batch = tuple[Tensor, ...]

SGD: Mapping[str, Any] = {"optimizer": "sgd", "lr": (1e-3, 1.0)}
GPU_TRIALS = 256
"""Trials of tasks on a GPU. With 64 trials and 9 epochs, ASHA would cost only about 16 full trainings, so no search
that ends with a full training could be 20 times as fast."""


@dataclass(frozen=True)
class Task:
    """A task that searches tune.

    Attributes:
        kind: "class": integer targets, scored by accuracy; "token": integer targets, scored by cross-entropy in nats;
            "field": scored by the mean squared error.
        held: Inputs, targets and weights; validation first, then test.
        optimizer: "sgd" or "adamw".
        max_t: Epochs of a full training.
        reduced: True if this is a smaller version, for a quick look.
        device: The device on which its models train. Its data are loaded into main memory; `on_device` moves them.
        split: Number of the split of its examples. Most tasks have one split.
        choices: Hyperparameter -> its values, in addition to the space, or instead of those in the space.
    """

    name: str
    model_fn: Callable[[Config, float], nn.Module]
    kind: Literal["class", "token", "field"]
    train: Batch
    held: Batch
    lr: tuple[float, float] = (1e-4, 1e-1)
    batch_sizes: tuple[int, ...] = (32, 64)
    optimizer: Literal["sgd", "adamw"] = "adamw"
    num_samples: int = 48
    max_t: int = 9
    reduced: bool = False
    device: str = "cpu"
    split: int = 0
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def mode(self) -> Literal["min", "max"]:
        """Return "max" if a larger score is better, else "min"."""
        return "max" if self.kind == "class" else "min"

    def on_device(self) -> Task:
        """Return the same task, with its data on the device on which its models train."""
        train, held = (tuple(part.to(self.device) for part in parts) for parts in (self.train, self.held))
        return replace(self, train=train, held=held)

    def of_seed(self, seed: int) -> Task:
        """Return the task for a search with this seed. If there is one split, it is the same for all seeds."""
        return self

    def space(self) -> dict[str, Any]:
        """Return the search space of Hydro's study (Hu et al. 2023, section 5.4), with `choices`."""
        from hydro_rasda import choice, loguniform, uniform

        return {
            "optimizer": self.optimizer,
            "lr": loguniform(*self.lr),
            "momentum" if self.optimizer == "sgd" else "beta1": uniform(0.5, 0.99),
            "batch_size": choice(list(self.batch_sizes)),
            "schedule": choice(["constant", "cosine"]),
            **{name: choice(list(values)) for name, values in self.choices.items()},
        }


def objective(kind: str) -> Callable[[nn.Module, Batch], Mapping[str, Tensor]]:
    """Return a function that computes the loss of a batch and, for a batch of `held`, the scores of its two parts."""

    def measure(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        inputs, target, *weights = batch
        output = model(inputs)
        if kind == "field":
            errors = (output - target).square()
        else:
            errors = F.cross_entropy(output.movedim(-1, 1), target, reduction="none")
        losses = errors.view(len(target), -1).mean(1)
        if not weights:
            return {"loss": losses.mean()}
        scores = (output.argmax(-1) == target).to(losses.dtype) if kind == "class" else losses
        score, test = (scores[:, None] * weights[0]).mean(0)
        return {"loss": losses.mean(), "score": score, "test": test}

    return measure


def sizes(reduced: bool, trials: int) -> dict[str, Any]:
    """Return the trials and epochs of a task that has a reduced version."""
    return {"num_samples": 12 if reduced else trials, "max_t": 3 if reduced else 9, "reduced": reduced}


def held(validation: Batch, test: Batch) -> Batch:
    """Join the inputs and targets of both parts to `Task.held`: one after the other, with their weights."""
    sizes = [len(validation[0]), len(test[0])]
    weights = torch.zeros(sum(sizes), 2)
    weights[: sizes[0], 0] = sum(sizes) / sizes[0]
    weights[sizes[0] :, 1] = sum(sizes) / sizes[1]
    return (*(torch.cat(parts) for parts in zip(validation, test)), weights)
