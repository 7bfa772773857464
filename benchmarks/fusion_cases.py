"""The models on which fusion is measured, each with its batch, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """One model. A trial minimizes `loss(model, batch)` with the optimizer of `config`; its learning rate varies."""

    name: str
    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[Any, Any], Tensor]
    config: dict[str, Any]

    def trials(self, count: int, seed: int) -> tuple[list[nn.Module], list[dict[str, Any]]]:
        """Return models with different initial weights, and configurations whose learning rates span a factor of 10."""
        torch.manual_seed(seed)
        rates = [10 ** (k / max(count - 1, 1)) for k in range(count)]
        configs = [{**self.config, "lr": self.config["lr"] * rate} for rate in rates]
        return [self.make() for _ in range(count)], configs


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of class scores [N, C]."""
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of scores [N, T, V] for the tokens [N, T + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def next_token_gpt2(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss of `next_token` for a model of `transformers`."""
    scores = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def mlp() -> nn.Module:
    """Build an MLP 784-32-32-10."""
    sizes = (784, 32, 32, 10)
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Transformer(nn.Module):
    """A causal transformer: two layers of width 32 with 4 heads, 1000 words, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 32)
        self.places = nn.Parameter(0.02 * torch.randn(32, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.readout = nn.Linear(32, 1000)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [N, T] to scores [N, T, V]."""
        x = self.layers(self.words(tokens) + self.places, mask=self.mask, is_causal=True)
        scores: Tensor = self.readout(x)
        return scores


def conv() -> nn.Module:
    """Build two convolutions, 8 and 16 channels, each with BatchNorm, ReLU and max-pooling, on 28 x 28 pixels."""
    blocks = [
        layer
        for i, o in ((1, 8), (8, 16))
        for layer in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16 * 7 * 7, 10))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut (He et al. 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            narrow = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(narrow, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, channels, H/stride, W/stride]."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def resnet18(width: int = 8) -> nn.Module:
    """Build a ResNet-18 for 32 x 32 pixels, whose first layer has `width` channels (64 in the original)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels_in = width
    for stage, stride in enumerate((1, 2, 2, 2)):
        channels = width * 2**stage
        layers += [ResidualBlock(channels_in, channels, stride), ResidualBlock(channels, channels, 1)]
        channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, 10))


def lora_gpt2() -> nn.Module:
    """Build adapters of rank 4 on the attention of a frozen GPT-2: 4 layers of width 128, 1000 words, no dropout."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 1000, "n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
    ends = {"bos_token_id": None, "eos_token_id": None}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # so that all trials have the same base
        base = GPT2LMHeadModel(GPT2Config(**sizes, **ends, **no_dropout))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    adapted: nn.Module = get_peft_model(base, lora)
    return adapted


def images(samples: int, *shape: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Return a function that draws random images and classes."""
    return lambda g: (torch.randn(samples, *shape, generator=g), torch.randint(0, 10, (samples,), generator=g))


def tokens(samples: int, length: int) -> Callable[[torch.Generator], Tensor]:
    """Return a function that draws random tokens [samples, length + 1], of which the last is only a label."""
    return lambda g: torch.randint(0, 1000, (samples, length + 1), generator=g)


SGD = {"optimizer": "sgd", "lr": 1e-2, "momentum": 0.9}
ADAMW = {"optimizer": "adamw", "lr": 1e-4}
MUON = {"optimizer": "muon", "lr": 1e-3}
LION, ADAFACTOR = {"optimizer": "lion", "lr": 1e-4}, {"optimizer": "adafactor", "lr": 1e-2}
PRODIGY = {"optimizer": "prodigy", "lr": 1.0}
CASES = [
    Case("mlp", "MLP 784-32-32-10 (64)", mlp, images(64, 784), classify, ADAMW),
    Case(
        "transformer",
        "2-layer transformer, width 32, 1000 words (8 x 32 tokens)",
        Transformer,
        tokens(8, 32),
        next_token,
        ADAMW,
    ),
    Case("mlp_muon", "MLP 784-32-32-10 under Muon (64)", mlp, images(64, 784), classify, MUON),
    Case(
        "transformer_muon",
        "2-layer transformer, width 32, under Muon (8 x 32 tokens)",
        Transformer,
        tokens(8, 32),
        next_token,
        MUON,
    ),
    *(
        Case(f"mlp_{kind}", f"MLP 784-32-32-10 under {kind.title()} (64)", mlp, images(64, 784), classify, config)
        for kind, config in (("lion", LION), ("adafactor", ADAFACTOR), ("prodigy", PRODIGY))
    ),
    Case("conv", "conv 8-16 with BatchNorm, 28 x 28 (64)", conv, images(64, 1, 28, 28), classify, SGD),
    Case("resnet18", "ResNet-18 of width 1/8, CIFAR (64)", resnet18, images(64, 3, 32, 32), classify, SGD),
    Case(
        "lora",
        "LoRA rank 4 on GPT-2, 4 layers, width 128 (8 x 64 tokens), base frozen",
        lora_gpt2,
        tokens(8, 64),
        next_token_gpt2,
        ADAMW,
    ),
]
