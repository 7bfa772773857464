"""Small model functions for the tuner's tests, at module level, so that they can be pickled and imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Config = dict[str, Any]

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


def mlp(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """64 -> 32 -> 32 -> 10 at full width."""
    width, activation = int(32 * width_ratio), ACTIVATIONS[config.get("activation", "relu")]
    dropout = [nn.Dropout(config["dropout"])] if "dropout" in config else []
    return nn.Sequential(
        nn.Linear(64, width), activation(), nn.Linear(width, width), activation(), *dropout, nn.Linear(width, 10)
    )


def fixed_mlp(config: Config) -> nn.Module:
    """The same, without a width argument."""
    return mlp(config)


def regressor(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """64 -> 32 -> 1 at full width."""
    width = int(32 * width_ratio)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 1))


def next_token(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """[N, T] tokens of 10 -> [N, T, 10], by way of 32 units at full width."""
    width = int(32 * width_ratio)
    return nn.Sequential(nn.Embedding(10, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def refuses_some(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """Raises for one configuration, before there is a model."""
    if config.get("bad"):
        raise RuntimeError("this configuration cannot be built")
    return mlp(config, width_ratio)


class Stumbling(nn.Module):
    """An MLP whose forward pass raises where it was told to."""

    def __init__(self, config: Config, width_ratio: float) -> None:
        super().__init__()
        self.body = mlp(config, width_ratio)
        self.stumbles = float(config.get("stumbles", 0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.stumbles > 0.5:
            raise RuntimeError("this forward pass cannot be done")
        y: Tensor = self.body(x)
        return y


def stumbles_in_some(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """Models of one structure, one of which cannot run."""
    return Stumbling(config, width_ratio)


def counted(calls: list[bool], interrupted_at: int = 0) -> Callable[..., nn.Module]:
    """`mlp`, which adds to `calls` whenever it is called, and is interrupted at the call of that number."""

    class Counting(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            if len(calls) == interrupted_at:
                raise KeyboardInterrupt
            y: Tensor = self.body(x)
            return y

    return lambda config, width_ratio=1.0: Counting(mlp(config, width_ratio))
