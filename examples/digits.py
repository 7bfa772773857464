"""Tune a 4-layer MLP on scikit-learn's digits: 128 configurations in a minute or so on a laptop."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hydro_rasda import SweepConfig, choice, loguniform, tune, uniform
from hydro_rasda.schedulers.named_rules import RULES

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}

SPACE = {
    "lr": loguniform(1e-4, 1),
    "momentum": uniform(0.5, 0.999),
    "weight_decay": loguniform(1e-6, 1e-2),
    "optimizer": choice(["sgd", "adamw"]),
    "activation": choice(list(ACTIVATIONS)),
    "batch_size": choice([32, 64]),
}


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """A 4-layer MLP, 512 wide at full size."""
    width, activation = int(512 * width_ratio), ACTIVATIONS[config["activation"]]
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), activation())]
    return nn.Sequential(nn.Linear(64, width), activation(), *hidden, nn.Linear(width, 10))


def load_data() -> tuple[tuple[Tensor, Tensor], ...]:
    """The 1797 digits as training, validation and test set: 1257, 270 and 270 examples."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
    y = torch.tensor(digits.target)[order]
    return tuple((x[part], y[part]) for part in (slice(0, 1257), slice(1257, 1527), slice(1527, None)))


def main() -> None:
    """Tune, then say what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="name of the run; a run that was interrupted goes on under its name")
    parser.add_argument("--rule", default="halving", choices=RULES, help="decides which trials go on in the sweep")
    parser.add_argument("--backend", default="local", choices=["local", "ray"])
    parser.add_argument("--address", help="of a running Ray cluster; without it, --backend ray starts one here")
    arguments = parser.parse_args()

    backend = arguments.backend
    if arguments.address is not None:
        from hydro_rasda import RayBackend  # it imports Ray, for which a local search need not wait

        backend = RayBackend(arguments.address)
    train_data, val_data, test_data = load_data()
    result = tune(
        model_fn,
        SPACE,
        train_data=train_data,
        val_data=val_data,
        num_samples=128,
        max_t=27,
        sweep=SweepConfig(rule=arguments.rule),
        seed=arguments.seed,
        name=arguments.name,
        backend=backend,
    )
    test = result.evaluate(test_data)
    validation = result.evaluate(val_data)
    print(f"validation accuracy {validation['accuracy']:.4f}, test accuracy {test['accuracy']:.4f}")


if __name__ == "__main__":
    main()
