"""Tasks on small images and spectrograms: normalized depthwise networks, noise, augmentation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tasks.images import Residual, normalized_cnn, plain_cnn, shuffled_digits
from benchmarks.tasks.task import SGD, Batch, Config, Task, held
from benchmarks.transfer_tasks import cifar_images, existing

SPOKEN_DIGITS = "spoken_digits/spoken_digits.npz"
SCHEDULES = {"schedule": ["constant", "cosine", "linear"]}


class DepthwiseCNN(nn.Module):
    """Images [N, channels, H, W] -> logits [N, 10]; one residual depthwise block with GroupNorm.

    It stays near chance for its first epochs.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.pointwise = nn.Conv2d(width, width, 1)
        self.norm = nn.GroupNorm(4, width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.readout = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        hidden = F.gelu(self.stem(images))
        hidden = hidden + F.gelu(self.norm(self.pointwise(self.depthwise(hidden))))
        logits: Tensor = self.readout(F.gelu(self.down(hidden)).mean((2, 3)))
        return logits


def _depthwise(channels: int) -> Callable[[Config, float], nn.Module]:
    return lambda config, ratio: DepthwiseCNN(channels, int(64 * ratio))


def spoken_digits(data: Path, reduced: bool) -> Task:
    """3,000 spoken digits as spectrograms, a residual depthwise CNN of 64 channels; 2,000 to train on.

    No default may be chosen by this task. It only shows what can go wrong.
    """
    with np.load(existing(data / SPOKEN_DIGITS)) as archive:
        x, y = torch.tensor(archive["x"]).float()[:, None], torch.tensor(archive["y"]).long()
    x = (x - x.mean()) / x.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, validation, test = zip(x[order].split([2000, 500, 500]), y[order].split([2000, 500, 500]))
    either = {"optimizer": ["adamw", "sgd"]}
    model_fn = _depthwise(1)
    return Task("spoken_digits", model_fn, "token", train, held(validation, test), optimizer="sgd", choices=either)


def depthwise(data: Path, reduced: bool) -> Task:
    """CIFAR-10 at 16x16 pixels, a residual depthwise CNN of 64 channels; 2,000 images to train on, by the loss."""
    parts = _small_cifar(data, 2000)
    return Task("depthwise", _depthwise(3), "token", *parts, lr=(1e-4, 3e-2), choices=SCHEDULES)


def wide_residual(data: Path, reduced: bool) -> Task:
    """CIFAR-10 at 16x16 pixels, a residual CNN 128-256-512 with GroupNorm; 2,000 images to train on, by the loss."""

    def model_fn(config: Config, ratio: float) -> nn.Module:
        first, second, third = (int(width * ratio) for width in (128, 256, 512))
        return nn.Sequential(
            *(nn.Conv2d(3, first, 3, stride=2, padding=1), Residual(first)),
            *(nn.Conv2d(first, second, 3, stride=2, padding=1), Residual(second)),
            *(nn.Conv2d(second, third, 3, padding=1), Residual(third)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(third, 10)),
        )

    return Task("wide_residual", model_fn, "token", *_small_cifar(data, 2000), choices=SCHEDULES, **SGD)


def augmented(data: Path, reduced: bool) -> Task:
    """CIFAR-10 at 16x16 pixels, 500 images flipped and shifted to 2,000, a CNN 32-64-128 with BatchNorm."""
    (x, y), others = _small_cifar(data, 500)
    x = torch.cat([x, x.flip(-1), F.pad(x, (2, 0, 2, 0))[..., :-2, :-2], F.pad(x, (0, 2, 0, 2))[..., 2:, 2:].flip(-1)])
    return Task("augmented", partial(normalized_cnn, pools=2), "token", (x, y.repeat(4)), others, **SGD)


def label_noise(data: Path, reduced: bool) -> Task:
    """Digits as images, with 3 in 10 training labels drawn at random; a CNN of 32 and 64 channels, by the loss."""
    (x, y), validation, test = _digits()
    drawn = torch.Generator().manual_seed(1)
    noisy = torch.where(torch.rand(len(y), generator=drawn) < 0.3, torch.randint(10, y.shape, generator=drawn), y)
    decays, parts = {"weight_decay": [0.0, 1e-2, 1e-1]}, held(validation, test)
    return Task("label_noise", plain_cnn, "token", (x, noisy), parts, max_t=18, choices=decays)


def denoising(data: Path, reduced: bool) -> Task:
    """Digits behind noise, an autoencoder 64-512-512-16-512-512-64 of linear layers; 797 to train on."""
    noise = torch.Generator().manual_seed(2)
    parts = [((x + 0.4 * torch.randn(x.shape, generator=noise)).flatten(1), x.flatten(1)) for x, _ in _digits()]

    def model_fn(config: Config, ratio: float) -> nn.Module:
        # The code keeps its size at every width, because its size sets the compression.
        width, code = int(512 * ratio), 16
        sizes = [(64, width), (width, width), (width, code), (code, width), (width, width)]
        hidden = [layer for i, o in sizes for layer in (nn.Linear(i, o), nn.GELU())]
        return nn.Sequential(*hidden, nn.Linear(width, 64))

    train, validation, test = parts
    return Task("denoising", model_fn, "field", train, held(validation, test), max_t=18)


def _digits() -> list[Batch]:
    """Digits [N, 1, 8, 8] with labels: 797 to train on, 500 to validate, 500 to test."""
    x, y = shuffled_digits()
    sizes = [797, 500, 500]
    return list(zip(x.view(-1, 1, 8, 8).split(sizes), y.split(sizes)))


def _small_cifar(data: Path, count: int) -> tuple[Batch, Batch]:
    """CIFAR-10 at 16x16 pixels: `count` images to train on, 1,000 to validate, 1,000 to test."""
    x, y = cifar_images(data, "train", 0, count)
    held_x, held_y = cifar_images(data, "test", 0, 2000)
    half = F.avg_pool2d(held_x, 2)
    return (F.avg_pool2d(x, 2), y), held((half[:1000], held_y[:1000]), (half[1000:], held_y[1000:]))
