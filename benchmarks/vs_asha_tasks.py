"""The tasks of the comparison with plain ASHA: real data, a model that takes a width ratio, and its space.

A model is scored on validation and test examples at once, by every method and after every epoch: batches of `held` are
`(inputs, target, weights)`, where `weights` [N, 2] make the mean over all examples of (score x weight) the mean score
of the validation part (first column) or of the test part (second). Searches see the validation score alone; the other
one is what the comparison is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fusion_cases import resnet18
from benchmarks.transfer_tasks import CharTransformer, cifar_images, shakespeare_tokens, windows

Config = dict[str, Any]
Batch = tuple[Tensor, ...]

GPU_TRIALS = 256
"""With 64 trials and 9 epochs ASHA costs about 16 full trainings: nothing that ends with one is 20 times as fast."""


@dataclass(frozen=True)
class Task:
    """What is tuned.

    Attributes:
        name: Of the task.
        model_fn: `model_fn(config, width_ratio)`.
        kind: "class": integer targets, scored by accuracy; "token": integer targets, scored by cross-entropy in nats;
            "field": scored by the mean squared error.
        train: Inputs and targets.
        held: Inputs, targets and weights; validation first, then test.
        lr: Lowest and highest learning rate.
        batch_sizes: To choose from.
        optimizer: "sgd" or "adamw".
        num_samples: Trials.
        max_t: Epochs of a full training.
        reduced: Whether this is a smaller version, for a quick look.
        device: Where its models train. Its data are loaded into main memory; `on_device` moves them.
    """

    name: str
    model_fn: Callable[[Config, float], nn.Module]
    kind: Literal["class", "token", "field"]
    train: Batch
    held: Batch
    lr: tuple[float, float]
    batch_sizes: tuple[int, ...]
    optimizer: Literal["sgd", "adamw"]
    num_samples: int
    max_t: int
    reduced: bool
    device: str = "cpu"

    @property
    def mode(self) -> Literal["min", "max"]:
        """Which way a score is better."""
        return "max" if self.kind == "class" else "min"

    def on_device(self) -> Task:
        """The same task, its data where its models train."""
        train, held = (tuple(part.to(self.device) for part in parts) for parts in (self.train, self.held))
        return replace(self, train=train, held=held)

    def space(self) -> dict[str, Any]:
        """The search space of Hydro's study (Hu et al. 2023, section 5.4): batch size, lr, momentum, schedule."""
        from ray.tune import choice, loguniform, uniform

        return {
            "optimizer": self.optimizer,
            "lr": loguniform(*self.lr),
            "momentum" if self.optimizer == "sgd" else "beta1": uniform(0.5, 0.99),
            "batch_size": choice(list(self.batch_sizes)),
            "schedule": choice(["constant", "cosine"]),
        }


def load_task(name: str, data: Path, *, reduced: bool = False) -> Task:
    """Build a task by name.

    Args:
        name: "digits", "cifar10", "shakespeare" or "turbulence"; for a GPU "cifar10_resnet18" or "shakespeare_gpt".
        data: Folder of the data sets.
        reduced: Fewer examples, trials and epochs, for a quick look; digits stay as they are.

    Raises:
        ValueError: There is no such task.
        FileNotFoundError: Its data file is missing; the message says where it was looked for.
    """
    if name not in TASKS:
        raise ValueError(f"task is {name!r}, but must be one of {sorted(TASKS)}")
    return TASKS[name](data, reduced)


def objective(kind: str) -> Callable[[nn.Module, Batch], Mapping[str, Tensor]]:
    """The loss of a training batch; for a batch of `held` the scores of its two parts, too.

    Args:
        kind: See `Task`.
    """

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


def _held(validation: Batch, test: Batch) -> Batch:
    """Both parts one after the other, with their weights."""
    sizes = [len(validation[0]), len(test[0])]
    weights = torch.zeros(sum(sizes), 2)
    weights[: sizes[0], 0] = sum(sizes) / sizes[0]
    weights[sizes[0] :, 1] = sum(sizes) / sizes[1]
    return (*(torch.cat(parts) for parts in zip(validation, test)), weights)


def _digits(data: Path, reduced: bool) -> Task:
    """scikit-learn's 8x8 digits, an MLP 64-256-256-10; 1,197 to train on, 300 to validate, 300 to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return Task(
        name="digits",
        model_fn=_mlp,
        kind="class",
        train=(x[600:], y[600:]),
        held=_held((x[:300], y[:300]), (x[300:600], y[300:600])),
        lr=(1e-3, 1.0),
        batch_sizes=(32, 64),
        optimizer="sgd",
        num_samples=64,
        max_t=27,
        reduced=False,
    )


def _mlp(config: Config, width_ratio: float) -> nn.Module:
    width = int(256 * width_ratio)
    return nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)),
    )


def _cifar10(data: Path, reduced: bool) -> Task:
    """CIFAR-10, a CNN 32-64-128 with BatchNorm; 10,000 images to train on, 1,000 to validate, 1,000 to test."""
    size = 2000 if reduced else 10_000
    return Task(
        name="cifar10",
        model_fn=_cnn,
        kind="class",
        train=cifar_images(data, "train", 0, size),
        held=_held(cifar_images(data, "train", 10_000, 11_000), cifar_images(data, "test", 0, 1000)),
        lr=(1e-3, 1.0),
        batch_sizes=(64, 128),
        optimizer="sgd",
        num_samples=12 if reduced else 48,
        max_t=3 if reduced else 9,
        reduced=reduced,
    )


def _cnn(config: Config, width_ratio: float) -> nn.Module:
    widths = [3, *(int(width * width_ratio) for width in (32, 64, 128))]
    blocks = [
        layer
        for i, o in pairwise(widths)
        for layer in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def _shakespeare(data: Path, reduced: bool) -> Task:
    """Characters of tiny shakespeare in windows of 32; a transformer of 4 layers, 128 wide, heads of 16."""
    tokens, vocabulary = shakespeare_tokens(data)
    return Task(
        name="shakespeare",
        model_fn=lambda config, ratio: CharTransformer(vocabulary, int(128 * ratio), layers=4),
        kind="token",
        train=windows(tokens, 0, 300 if reduced else 1000),
        held=_held(windows(tokens, 1_000_000, 100), windows(tokens, 1_050_000, 100)),
        lr=(1e-4, 1e-1),
        batch_sizes=(16, 32),
        optimizer="adamw",
        num_samples=12 if reduced else 64,
        max_t=3 if reduced else 9,
        reduced=reduced,
    )


def _cifar10_resnet18(data: Path, reduced: bool) -> Task:
    """All of CIFAR-10, ResNet-18; 50,000 images to train on, 5,000 of the test images to validate, 5,000 to test."""
    size, half = (2000, 500) if reduced else (50_000, 5000)
    x, y = cifar_images(data, "test", 0, 2 * half)
    return Task(
        name="cifar10_resnet18",
        model_fn=lambda config, ratio: resnet18(int(64 * ratio)),
        kind="class",
        train=cifar_images(data, "train", 0, size),
        held=_held((x[:half], y[:half]), (x[half:], y[half:])),
        lr=(1e-3, 1.0),
        batch_sizes=(128, 256),
        optimizer="sgd",
        num_samples=12 if reduced else GPU_TRIALS,
        max_t=3 if reduced else 9,
        reduced=reduced,
        device="cuda",
    )


def _shakespeare_gpt(data: Path, reduced: bool) -> Task:
    """The first million characters of tiny shakespeare; a transformer of 6 layers, 384 wide, heads of 16."""
    tokens, vocabulary = shakespeare_tokens(data)
    return replace(
        _shakespeare(data, reduced),
        name="shakespeare_gpt",
        model_fn=lambda config, ratio: CharTransformer(vocabulary, int(384 * ratio), layers=6),
        train=windows(tokens, 0, 1000 if reduced else 31_250),
        held=_held(windows(tokens, 1_000_000, 1000), windows(tokens, 1_050_000, 1000)),
        batch_sizes=(64, 128),
        num_samples=12 if reduced else GPU_TRIALS,
        device="cuda",
    )


def _turbulence(data: Path, reduced: bool) -> Task:
    """Patches of 32x32 of decaying turbulence; an autoencoder of 32, 64 and 128 channels, to a quarter of the size.

    Flows, not frames, are split: 12 to train on, 2 to validate, 2 to test, each of 16 frames of 4 patches.
    """
    from benchmarks.turbulence import snapshots

    flows, frames = (6, 8) if reduced else (16, 16)
    threads = torch.get_num_threads()
    # Threads gain little on transforms this small, and lose much where cores are shared: they wait for each other.
    torch.set_num_threads(1)
    fields = snapshots(flows, frames)
    torch.set_num_threads(threads)
    patches = fields.unfold(2, 32, 32).unfold(3, 32, 32).reshape(flows, -1, 1, 32, 32)
    train, validation, test = (part.flatten(0, 1) for part in (patches[:-4], patches[-4:-2], patches[-2:]))
    return Task(
        name="turbulence",
        model_fn=_autoencoder,
        kind="field",
        train=(train, train),
        held=_held((validation, validation), (test, test)),
        lr=(1e-4, 1e-1),
        batch_sizes=(16, 32),
        optimizer="adamw",
        num_samples=12 if reduced else 64,
        max_t=3 if reduced else 9,
        reduced=reduced,
    )


def _autoencoder(config: Config, width_ratio: float) -> nn.Module:
    # The code says how much is compressed, as inputs and outputs say what: it is no width.
    code, widths = 16, [int(width * width_ratio) for width in (32, 64, 128)]
    encoder = [
        layer for i, o in pairwise([1, *widths]) for layer in (nn.Conv2d(i, o, 3, stride=2, padding=1), nn.GELU())
    ]
    narrow = [nn.Conv2d(widths[-1], code, 1), nn.Conv2d(code, widths[-1], 1), nn.GELU()]
    decoder = [
        layer
        for i, o in pairwise(widths[::-1])
        for layer in (nn.ConvTranspose2d(i, o, 4, stride=2, padding=1), nn.GELU())
    ]
    return nn.Sequential(*encoder, *narrow, *decoder, nn.ConvTranspose2d(widths[0], 1, 4, stride=2, padding=1))


TASKS: dict[str, Callable[[Path, bool], Task]] = {
    "digits": _digits,
    "cifar10": _cifar10,
    "shakespeare": _shakespeare,
    "turbulence": _turbulence,
    "cifar10_resnet18": _cifar10_resnet18,
    "shakespeare_gpt": _shakespeare_gpt,
}
