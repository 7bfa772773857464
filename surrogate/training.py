"""A plain training loop for one surrogate: what the checks run where no faster trainer is handed to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surrogate.multipliers import lr_multipliers, weight_decay_multipliers

Objective = Callable[[nn.Module, Any], Tensor]
"""`objective(model, batch)`: the loss, a scalar."""


def make_optimizer(surrogate: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """torch's own optimizer with one parameter group for each parameter, at its multiplied rates.

    Args:
        surrogate: From `make_surrogate` or `shrink`; at width ratio 1 all multipliers are 1.
        config: `lr` (required), `optimizer` ("sgd", "adam" or "adamw"; default "adamw"), `momentum`,
            `nesterov`, `beta1`, `beta2`, `eps`, `weight_decay`; other keys are ignored.

    Raises:
        ValueError: `lr` is missing, or `optimizer` is another word.
    """
    if "lr" not in config:
        raise ValueError(f"config has no 'lr', only {sorted(config)}; a configuration must state its learning rate")
    kind = config.get("optimizer", "adamw")
    rates = lr_multipliers(surrogate, kind)
    decays = weight_decay_multipliers(surrogate, kind)
    decay = config.get("weight_decay", 0.0)
    groups = [
        {"params": [p], "lr": config["lr"] * rates[name], "weight_decay": decay * decays[name]}
        for name, p in surrogate.named_parameters()
    ]
    if kind == "sgd":
        momentum, nesterov = config.get("momentum", 0.0), config.get("nesterov", False)
        return torch.optim.SGD(groups, lr=config["lr"], momentum=momentum, nesterov=nesterov)
    betas = (config.get("beta1", 0.9), config.get("beta2", 0.999))
    cls = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return cls(groups, lr=config["lr"], betas=betas, eps=config.get("eps", 1e-8))


def train(model: nn.Module, config: Mapping[str, Any], batches: Sequence[Any], objective: Objective) -> None:
    """One step for each batch, in place."""
    optimizer = make_optimizer(model, config)
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        objective(model, batch).backward()
        optimizer.step()


def evaluate(model: nn.Module, batches: Sequence[Any], objective: Objective) -> float:
    """Mean loss over batches, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return sum(objective(model, batch).item() for batch in batches) / len(batches)
