"""Tasks on images: digits, CIFAR-10, and fields of turbulence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fusion_cases import resnet18
from benchmarks.tasks.task import GPU_TRIALS, SGD, Config, Task, held, sizes
from benchmarks.transfer_tasks import cifar_images


def digits(data: Path, reduced: bool) -> Task:
    """scikit-learn's 8x8 digits, an MLP 64-256-256-10; 1,197 to train on, 300 to validate, 300 to test."""
    x, y = shuffled_digits()
    parts = held((x[:300], y[:300]), (x[300:600], y[300:600]))
    return Task("digits", _mlp, "class", (x[600:], y[600:]), parts, num_samples=64, max_t=27, **SGD)


def shuffled_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 8x8 digits in random order: inputs [N, 64] in [0, 1], and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def _mlp(config: Config, width_ratio: float) -> nn.Module:
    width = int(256 * width_ratio)
    return nn.Sequential(*(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)))


def _images(name: str, model_fn: Callable[[Config, float], nn.Module], **more: Any) -> Task:
    """Digits as images; 597 to train on, 600 to validate, 600 to test."""
    x, y = shuffled_digits()
    each = [597, 600, 600]
    train, validation, test = zip(x.view(-1, 1, 8, 8).split(each), y.split(each))
    return Task(name, model_fn, "class", train, held(validation, test), **SGD, **more)


def residual(data: Path, reduced: bool) -> Task:
    """Digits, a residual CNN of 32 and 64 channels with GroupNorm."""
    return _images("residual", lambda config, ratio: ResidualCNN(int(32 * ratio)))


class ResidualCNN(nn.Module):
    """Images [N, 1, 8, 8] -> logits [N, 10]. Each group has 4 channels, whatever the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.first = Residual(width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.second = Residual(2 * width)
        self.norm = nn.GroupNorm(width // 2, 2 * width)
        self.readout = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.second(self.down(self.first(self.stem(images))))
        logits: Tensor = self.readout(self.norm(hidden).relu().mean((-2, -1)))
        return logits


class Residual(nn.Module):
    """A pre-activation residual block (He et al. 2016, arXiv:1603.05027) with GroupNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [
            layer
            for _ in range(2)
            for layer in (
                nn.GroupNorm(channels // 4, channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            )
        ]
        self.branch = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of the input and the branch."""
        total: Tensor = images + self.branch(images)
        return total


def warm_up(data: Path, reduced: bool) -> Task:
    """Digits, a CNN of 32 and 64 channels without a norm, learning rates with a warm-up; 16 trials only."""
    return _images("warm_up", plain_cnn, num_samples=16, max_t=12, choices={"warmup_epochs": [0, 1, 2, 4]})


def plain_cnn(config: Config, width_ratio: float) -> nn.Module:
    """Images [N, 1, 8, 8] -> logits [N, 10]; two convolutions of 32 and 64 channels, and two linear layers."""
    first, second = (int(width * width_ratio) for width in (32, 64))
    return nn.Sequential(
        *(nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4 * second, 2 * second), nn.ReLU(), nn.Linear(2 * second, 10)),
    )


def cifar10(data: Path, reduced: bool) -> Task:
    """CIFAR-10, a CNN 32-64-128 with BatchNorm; 10,000 images to train on, 1,000 to validate, 1,000 to test."""
    size = 2000 if reduced else 10_000
    return Task(
        name="cifar10",
        model_fn=normalized_cnn,
        kind="class",
        train=cifar_images(data, "train", 0, size),
        held=held(cifar_images(data, "train", 10_000, 11_000), cifar_images(data, "test", 0, 1000)),
        batch_sizes=(64, 128),
        **SGD,
        **sizes(reduced, 48),
    )


def normalized_cnn(config: Config, width_ratio: float, pools: int = 3) -> nn.Module:
    """Images [N, 3, H, W] -> logits [N, 10]; 32, 64, 128 channels with BatchNorm, pooled after the first `pools`."""
    widths = [3, *(int(width * width_ratio) for width in (32, 64, 128))]
    blocks = [
        layer
        for place, (i, o) in enumerate(pairwise(widths))
        for layer in (
            *(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()),
            *([nn.MaxPool2d(2)] if place < pools else []),
        )
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def cifar10_resnet18(data: Path, reduced: bool) -> Task:
    """All of CIFAR-10, ResNet-18; 50,000 images to train on, 5,000 of the test images to validate, 5,000 to test."""
    size, half = (2000, 500) if reduced else (50_000, 5000)
    x, y = cifar_images(data, "test", 0, 2 * half)
    return Task(
        name="cifar10_resnet18",
        model_fn=lambda config, ratio: resnet18(int(64 * ratio)),
        kind="class",
        train=cifar_images(data, "train", 0, size),
        held=held((x[:half], y[:half]), (x[half:], y[half:])),
        batch_sizes=(128, 256),
        device="cuda",
        **SGD,
        **sizes(reduced, GPU_TRIALS),
    )


def turbulence(data: Path, reduced: bool) -> Task:
    """Patches of 32x32 of decaying turbulence; an autoencoder of 32, 64 and 128 channels, to a quarter of the size.

    Flows, not frames, are split: 12 to train on, 2 to validate, 2 to test, each of 16 frames of 4 patches.
    """
    from benchmarks.turbulence import snapshots

    flows, frames = (6, 8) if reduced else (16, 16)
    threads = torch.get_num_threads()
    # Use one thread. More threads gain little on transforms this small. On shared cores they lose much, because they
    # wait for each other.
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
        held=held((validation, validation), (test, test)),
        batch_sizes=(16, 32),
        **sizes(reduced, 64),
    )


def _autoencoder(config: Config, width_ratio: float) -> nn.Module:
    # The code keeps its size at every width, because its size sets the compression.
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
