"""Small models that take a width ratio, one for each kind of layer whose width matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Config = dict[str, Any]


def mlp(config: Config, width_ratio: float) -> nn.Module:
    """Digits-like: 64 -> 128 -> 128 -> 10 at full width."""
    width = int(config.get("width", 128) * width_ratio)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 10)
    )


def cnn(config: Config, width_ratio: float) -> nn.Module:
    """A plain, a depthwise and a transposed convolution, with batch and group norm; 3x8x8 images."""
    width = int(64 * width_ratio)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, groups=width),
        nn.GroupNorm(4, width),
        nn.ConvTranspose2d(width, 2 * width, 2, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def conv_readout(config: Config, width_ratio: float) -> nn.Module:
    """A segmentation-like model: its readout is a transposed convolution."""
    width = int(64 * width_ratio)
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(width, 2, 2, stride=2))


class Transformer(nn.Module):
    """A one-layer language model over 20 tokens; `tied` shares the readout's weight with the embedding."""

    def __init__(self, width: int, heads: int, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.position = nn.Parameter(torch.randn(6, width) * 0.02)
        self.block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.readout = nn.Linear(width, 20, bias=not tied)
        if tied:
            self.readout.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.block(self.embedding(tokens) + self.position)
        logits: Tensor = self.readout(hidden)
        return logits


def transformer(config: Config, width_ratio: float) -> nn.Module:
    """Fewer heads of the same size, 16, at a narrower width."""
    width = int(128 * width_ratio)
    return Transformer(width, width // 16, tied=config.get("tied", False))


def narrow_heads(config: Config, width_ratio: float) -> nn.Module:
    """As many heads at any width, so that their size is a width."""
    return Transformer(int(128 * width_ratio), 4, tied=False)


class TwoHeads(nn.Module):
    """One trunk, two readouts, a dict of outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(64, width)
        self.classes = nn.Linear(width, 10)
        self.box = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x).relu()
        return {"classes": self.classes(hidden), "box": self.box(hidden)}


def two_heads(config: Config, width_ratio: float) -> nn.Module:
    return TwoHeads(int(128 * width_ratio))


def lstm(config: Config, width_ratio: float) -> nn.Module:
    width = int(64 * width_ratio)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(8, width, batch_first=True)
            self.readout = nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.readout(self.cell(x)[0][:, -1])
            return out

    return Recurrent()


ModelFn = Callable[[Config, float], nn.Module]

ZOO: dict[str, tuple[ModelFn, Config, Tensor]] = {
    "mlp": (mlp, {}, torch.randn(4, 64)),
    "cnn": (cnn, {}, torch.randn(4, 3, 8, 8)),
    "conv_readout": (conv_readout, {}, torch.randn(4, 3, 8, 8)),
    "transformer": (transformer, {}, torch.randint(20, (4, 6))),
    "tied": (transformer, {"tied": True}, torch.randint(20, (4, 6))),
    "narrow_heads": (narrow_heads, {}, torch.randint(20, (4, 6))),
    "two_heads": (two_heads, {}, torch.randn(4, 64)),
    "lstm": (lstm, {}, torch.randn(4, 5, 8)),
}
"""Name -> (model_fn, config, a batch)."""
