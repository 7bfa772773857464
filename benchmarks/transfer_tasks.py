"""The three tasks of the transfer study: real data, a model that takes a width ratio, and a score."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

Config = dict[str, Any]
CONTEXT = 32


@dataclass(frozen=True)
class TransferTask:
    """A model function, its data, and its score.

    Attributes:
        optimizer: "sgd" or "adamw".
        score: "accuracy" in percent, to be maximized, or "loss" in nats, to be minimized.
    """

    name: str
    model_fn: Callable[[Config, float], nn.Module]
    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    epochs: int
    optimizer: Literal["sgd", "adamw"]
    score: Literal["accuracy", "loss"]

    @property
    def mode(self) -> Literal["min", "max"]:
        """Return "max" if a larger score is better, else "min"."""
        return "max" if self.score == "accuracy" else "min"


def load_task(name: str, data: Path) -> TransferTask:
    """Build a task by name.

    Raises:
        ValueError: if there is no such task.
        FileNotFoundError: if its data file is missing. The message has the path of the file.
    """
    if name not in TASKS:
        raise ValueError(f"task is {name!r}, but must be one of {sorted(TASKS)}")
    return TASKS[name](data)


def digits(data: Path) -> TransferTask:
    """Make a task of scikit-learn's 8x8 digits and a 4-layer MLP 512 wide."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return TransferTask("digits", _mlp, (x[:1200], y[:1200]), (x[1200:], y[1200:]), 10, "sgd", "accuracy")


def _mlp(config: Config, width_ratio: float) -> nn.Module:
    width = int(512 * width_ratio)
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def cifar10(data: Path) -> TransferTask:
    """Make a task of CIFAR-10 at 16x16 pixels, 2,000 to train and 1,000 to score, and a CNN of 64 to 128 channels."""
    (x, y), (x_val, y_val) = cifar_images(data, "train", 0, 2000), cifar_images(data, "test", 0, 1000)
    return TransferTask("cifar10", _cnn, (avg_pool2d(x, 2), y), (avg_pool2d(x_val, 2), y_val), 4, "sgd", "accuracy")


def cifar_images(data: Path, part: str, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return images [N, 3, 32, 32] in [-1, 1] and labels [N] of the part "train" or "test".

    Raises:
        FileNotFoundError: if the data file is missing. The message has its path.
    """
    from PIL import Image

    with np.load(existing(data / "cifar10" / "cifar10_jpeg.npz")) as archive:
        jpeg, offsets = archive[f"{part}_jpeg"], archive[f"{part}_offsets"]
        labels = torch.tensor(archive[f"{part}_labels"][start:stop], dtype=torch.long)
    files = (jpeg[offsets[i] : offsets[i + 1]].tobytes() for i in range(start, stop))
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])
    return torch.tensor(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1.0, labels


def _cnn(config: Config, width_ratio: float) -> nn.Module:
    width = int(64 * width_ratio)
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)),
    )


def shakespeare(data: Path) -> TransferTask:
    """Make a task of tiny shakespeare in windows of 32 characters and a pre-norm transformer, 2 layers, 128 wide."""
    tokens, vocabulary = shakespeare_tokens(data)
    return TransferTask(
        name="shakespeare",
        model_fn=lambda config, ratio: CharTransformer(vocabulary, int(128 * ratio)),
        train=windows(tokens, 0, 2000),
        val=windows(tokens, 1_000_000, 200),
        epochs=1,
        optimizer="adamw",
        score="loss",
    )


def shakespeare_tokens(data: Path) -> tuple[Tensor, int]:
    """Return the text as numbers [N] of its characters, and the number of different characters.

    Raises:
        FileNotFoundError: if the data file is missing. The message has its path.
    """
    text = existing(data / "tinyshakespeare" / "input.txt").read_text()
    place = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([place[character] for character in text]), len(place)


def windows(tokens: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Return `count` windows of CONTEXT characters from `start` on, and the next character at each position."""
    part = tokens[start : start + CONTEXT * count + 1]
    return part[:-1].view(count, CONTEXT), part[1:].view(count, CONTEXT)


class CharTransformer(nn.Module):
    """A causal language model over characters: tokens [N, T] -> logits [N, T, vocabulary]. Heads have a fixed size."""

    mask: Tensor

    def __init__(self, vocabulary: int, width: int, layers: int = 2, head: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        blocks = [
            nn.TransformerEncoderLayer(
                width, width // head, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character at each position."""
        hidden = self.embedding(tokens) + self.position
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.readout(self.norm(hidden))
        return logits


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, over samples and positions."""
    return cross_entropy(model(x).flatten(0, -2), y.flatten())


def score_of(task: TransferTask, model: nn.Module) -> float:
    """Return the validation score; NaN for a model that diverged."""
    x, y = task.val
    model.eval()
    with torch.no_grad():
        logits = model(x)
    loss = cross_entropy(logits.flatten(0, -2), y.flatten()).item()
    if not math.isfinite(loss):
        return math.nan
    return loss if task.score == "loss" else 100.0 * (logits.argmax(-1) == y).float().mean().item()


def existing(path: Path) -> Path:
    """Return the path of a data file.

    Raises:
        FileNotFoundError: if it is missing. The message has its path.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; point --data, or the environment variable HYDRO_RASDA_DATA, to the folder "
            "that holds it"
        )
    return path


TASKS: dict[str, Callable[[Path], TransferTask]] = {"digits": digits, "cifar10": cifar10, "shakespeare": shakespeare}
