"""Searches by the user's own training loop against Ray Tune's ASHA and Optuna's pruner.

`python -m benchmarks.own_loop asha optuna --seeds 3` prints a row for each search. The loop trains an MLP on
scikit-learn's digits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from hydro_rasda import LocalBackend, loguniform, tune

SPACE = {"lr": (1e-4, 1e-1), "decay": (1e-4, 1.0)}
Config = Mapping[str, Any]


def mlp(config: Config, width_ratio: float = 1.0, width: int = 512) -> nn.Module:
    """Build an MLP for digits."""
    inner = int(width * width_ratio)
    return nn.Sequential(
        *(nn.Linear(64, inner), nn.ReLU(), nn.Linear(inner, inner), nn.ReLU(), nn.Linear(inner, inner), nn.ReLU()),
        nn.Linear(inner, 10),
    )


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Read the images `[1797, 64]` and their labels, once in a process."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def epochs(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> Iterator[float]:
    """Train for epochs, and yield the validation loss after each."""
    x, y = digits()
    for _ in range(count):
        for rows in torch.randperm(1200).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            yield F.cross_entropy(model(x[1200:]), y[1200:]).nan_to_num(1e9).item()


def trained(config: Config, epochs_: int, width: int, seed: int) -> float:
    """Return the validation loss of a configuration, trained at full width from a seed."""
    torch.manual_seed(seed)
    model = mlp(config, width=width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["decay"])
    return [*epochs(model, optimizer, epochs_)][-1]


def by_tune(of: argparse.Namespace, seed: int) -> Config:
    """Search by `tune(train=...)`."""

    def train(worker: Any) -> None:
        config, model = worker.config, worker.model()
        optimizer = worker.optimizer(model, torch.optim.AdamW, lr=config["lr"], weight_decay=config["decay"])
        parts = {"model": model, "optimizer": optimizer}
        for name, state in (worker.checkpoint or {}).items():
            parts[name].load_state_dict(state)
        for loss in epochs(model, optimizer, worker.max_t - worker.iteration):
            worker.report({"val_loss": loss}, {name: part.state_dict() for name, part in parts.items()})

    space = {name: loguniform(*bounds) for name, bounds in SPACE.items()}
    with tempfile.TemporaryDirectory() as folder:
        result = tune(
            partial(mlp, width=of.width),
            space,
            train=train,
            num_samples=of.trials,
            max_t=of.epochs,
            seed=seed,
            storage_path=folder,
            backend=LocalBackend("cpu"),
            progress=False,
        )
    return result.best_config


def by_asha(of: argparse.Namespace, seed: int) -> Config:
    """Search by Ray Tune's ASHA, one trial on each core."""
    import ray
    from ray import tune as ray_tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search import BasicVariantGenerator

    width, count = of.width, of.epochs

    def train(config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        model = mlp(config, width=width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["decay"])
        for loss in epochs(model, optimizer, count):
            ray_tune.report({"val_loss": loss})

    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=of.cores)
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = ray_tune.Tuner(
                train,
                param_space={name: ray_tune.loguniform(*bounds) for name, bounds in SPACE.items()},
                tune_config=ray_tune.TuneConfig(
                    metric="val_loss",
                    mode="min",
                    num_samples=of.trials,
                    scheduler=ASHAScheduler(max_t=count, reduction_factor=3),
                    search_alg=BasicVariantGenerator(random_state=seed),
                ),
                run_config=ray_tune.RunConfig(storage_path=folder, verbose=0),
            ).fit()
            return dict(results.get_best_result().config or {})
    finally:
        ray.shutdown()


def by_optuna(of: argparse.Namespace, seed: int) -> Config:
    """Search by Optuna's successive halving, in one process with torch's own threads."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial: optuna.Trial) -> float:
        config = {name: trial.suggest_float(name, *bounds, log=True) for name, bounds in SPACE.items()}
        model, loss = mlp(config, width=of.width), 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["decay"])
        for epoch, loss in enumerate(epochs(model, optimizer, of.epochs)):
            trial.report(loss, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned()
        return loss

    pruner = optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner)
    study.optimize(objective, n_trials=of.trials)
    return study.best_params


def ported(of: argparse.Namespace, other: str, search: Callable[[argparse.Namespace, int], Config]) -> None:
    """Print wall time and the score of the winner, trained again from three seeds, of both searches."""
    for seed in range(of.seeds):
        for name, by in ((other, search), ("tune(train=...)", by_tune)):
            started = time.perf_counter()
            config = by(of, seed)
            seconds = time.perf_counter() - started
            score = statistics.mean(trained(config, of.epochs, of.width, 100 + again) for again in range(3))
            print(f"{other} seed {seed}: {name} took {seconds:.1f} s; val_loss of its winner, again: {score:.4f}")


def main() -> None:
    """Run the searches that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["asha", "optuna"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--cores", type=int, default=2)
    of = parser.parse_args()
    for part in of.parts:
        ported(of, part, by_asha if part == "asha" else by_optuna)


if __name__ == "__main__":
    main()
