"""Searches by a training loop of the user's own: `tune(train=...)`, Ray Tune's ASHA and Optuna's pruner.

    python -m benchmarks.own_loop [--seeds 0 1 2]

The loop trains an MLP 512 wide on scikit-learn's digits. 32 configurations, 27 epochs; `tune` and Ray have the same
ones, Optuna's TPE draws its own. With Ray, each core trains a trial; Optuna's study is one process with torch's own
threads, as its users run it. Each search hands back the best epoch by the validation loss; for the others this is
generous, as it takes a checkpoint of each epoch, which they do not write. Its configuration is then trained again from
three seeds, each time to the best epoch. Test losses count. All searches of a seed run one after another. What is
there is not run again. It rewrites `own_loop.{json,md}`.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from benchmarks.result_files import Row, columns, environment, options, read, save
from hydro_rasda import LocalBackend, loguniform, tune
from hydro_rasda.space.space import sample

FILE = "own_loop.json"
TRIALS, EPOCHS, WIDTH = 32, 27, 512
BOUNDS = {"lr": (1e-4, 1e-1), "decay": (1e-4, 1.0)}
SPACE = {name: loguniform(*bounds) for name, bounds in BOUNDS.items()}
AGAIN = 3
"""The number of times that a winner's configuration is trained again."""
OWN = "`tune(train=...)`"
LOSSES = ("handed back", "again", "again, last epoch")
"""Names of the test losses in a row of results."""
Config = Mapping[str, Any]
Losses = dict[str, float]


class Found(NamedTuple):
    """The configuration that a search hands back, and the losses of its best epoch."""

    config: Config
    losses: Losses


def mlp(config: Config, width_ratio: float = 1.0, width: int = WIDTH) -> nn.Module:
    """Build an MLP for digits."""
    inner = int(width * width_ratio)
    return nn.Sequential(
        *(nn.Linear(64, inner), nn.ReLU(), nn.Linear(inner, inner), nn.ReLU(), nn.Linear(inner, inner), nn.ReLU()),
        nn.Linear(inner, 10),
    )


@cache
def digits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Read images `[n, 64]` and labels of 1,000 training, 400 validation and 397 test examples, once in a process."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    parts = {"train": slice(0, 1000), "val": slice(1000, 1400), "test": slice(1400, None)}
    return {name: (x[part], y[part]) for name, part in parts.items()}


def epochs(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> Iterator[Losses]:
    """Train for epochs, and yield `val_loss` and `test_loss` after each."""
    x, y = digits()["train"]
    for _ in range(count):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            held = {name: digits()[name] for name in ("val", "test")}
            yield {f"{name}_loss": F.cross_entropy(model(x), y).nan_to_num(1e9).item() for name, (x, y) in held.items()}


def full_size(config: Config) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the model at full width, and its optimizer."""
    model = mlp(config)
    return model, torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["decay"])


def best(curve: Sequence[Losses]) -> Losses:
    """Return the losses of the epoch with the least validation loss."""
    return min(curve, key=lambda losses: losses["val_loss"])


def trained_again(config: Config) -> Row:
    """Train a configuration from three seeds, and return the mean test loss of best and of last epochs."""
    curves = []
    for seed in range(AGAIN):
        torch.manual_seed(100 + seed)
        curves.append([*epochs(*full_size(config), EPOCHS)])
    return {
        "again": mean(best(curve)["test_loss"] for curve in curves),
        "again, last epoch": mean(curve[-1]["test_loss"] for curve in curves),
    }


def by_tune(seed: int, cores: int) -> Found:
    """Search by `tune(train=...)`."""

    def train(worker: Any) -> None:
        config, model = worker.config, worker.model()
        optimizer = worker.optimizer(model, torch.optim.AdamW, lr=config["lr"], weight_decay=config["decay"])
        parts = {"model": model, "optimizer": optimizer}
        for name, state in (worker.checkpoint or {}).items():
            parts[name].load_state_dict(state)
        for losses in epochs(model, optimizer, worker.max_t - worker.iteration):
            told = {"val_loss": losses["val_loss"], "val_test_loss": losses["test_loss"]}  # `tune` keeps "val_..."
            worker.report(told, {name: part.state_dict() for name, part in parts.items()})

    with tempfile.TemporaryDirectory() as folder:
        result = tune(
            mlp,
            SPACE,
            train=train,
            num_samples=TRIALS,
            max_t=EPOCHS,
            seed=seed,
            storage_path=folder,
            backend=LocalBackend("cpu"),
            progress=False,
        )
        metrics = result.trials[result.best_trial].metrics
        return Found(result.best_config, {"test_loss": metrics["val_test_loss"]})


def by_asha(seed: int, cores: int) -> Found:
    """Search by Ray Tune's ASHA, one trial on each core."""
    import ray
    from ray import tune as ray_tune
    from ray.tune.schedulers import ASHAScheduler

    def train(given: dict[str, Any]) -> None:
        from benchmarks.own_loop import epochs, full_size  # in a Ray worker, `__main__` is another module

        torch.set_num_threads(1)
        for losses in epochs(*full_size(given["config"]), EPOCHS):
            ray_tune.report(losses)

    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=cores)
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = ray_tune.Tuner(
                train,
                param_space={"config": ray_tune.grid_search(sample(SPACE, TRIALS, seed))},
                tune_config=ray_tune.TuneConfig(
                    metric="val_loss", mode="min", scheduler=ASHAScheduler(max_t=EPOCHS, reduction_factor=3)
                ),
                run_config=ray_tune.RunConfig(storage_path=folder, verbose=0),
            ).fit()
            winner = results.get_best_result(scope="all")
            assert winner.config is not None
            assert winner.metrics_dataframe is not None
            return Found(winner.config["config"], best(winner.metrics_dataframe.to_dict("records")))
    finally:
        ray.shutdown()


def by_optuna(seed: int, cores: int) -> Found:
    """Search by Optuna's successive halving, in one process with torch's own threads."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial: optuna.Trial) -> float:
        config = {name: trial.suggest_float(name, *bounds, log=True) for name, bounds in BOUNDS.items()}
        curve = list[Losses]()
        for epoch, losses in enumerate(epochs(*full_size(config), EPOCHS)):
            curve.append(losses)
            trial.set_user_attr("best", best(curve))
            trial.report(losses["val_loss"], epoch)
            if trial.should_prune():
                raise optuna.TrialPruned()
        return best(curve)["val_loss"]

    torch.set_num_threads(cores)
    pruner = optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner)
    study.optimize(objective, n_trials=TRIALS)
    torch.set_num_threads(1)
    return Found(study.best_params, study.best_trial.user_attrs["best"])


SEARCHES: dict[str, Callable[[int, int], Found]] = {
    "Ray Tune, ASHA": by_asha,
    "Optuna, TPE with successive halving": by_optuna,
    OWN: by_tune,
}


def measure(search: str, seed: int) -> Row:
    """Run a search, and train its winner again."""
    torch.manual_seed(seed)
    began = time.perf_counter()
    found = SEARCHES[search](seed, len(os.sched_getaffinity(0)))
    seconds = time.perf_counter() - began
    row = {"search": search, "seed": seed, "seconds": seconds, "config": dict(found.config)}
    row |= {"handed back": found.losses["test_loss"], **trained_again(found.config)}
    print(row, flush=True)
    return row


class Compared(NamedTuple):
    """A search over its seeds.

    Attributes:
        seconds: Median wall time.
        faster: Median ratio of its wall time to that of `tune` with the same seed; None for `tune` itself.
        losses: Test losses in the order of `LOSSES`, each as text with a number for each seed.
        as_good: Number of seeds with which the configuration of `tune`, trained again, is as good or better.
        seeds: Number of seeds that the search and `tune` both have.
    """

    search: str
    seconds: float
    faster: float | None
    losses: list[str]
    as_good: int
    seeds: int


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Compare each search with `tune`, seed by seed."""
    own, found = {row["seed"]: row for row in rows if row["search"] == OWN}, []
    for search in SEARCHES:
        of_search = sorted((row for row in rows if row["search"] == search), key=lambda row: row["seed"])
        pairs = [(row, own[row["seed"]]) for row in of_search if row["seed"] in own]
        if not pairs:
            continue
        ratio = None if search == OWN else median(row["seconds"] / ours["seconds"] for row, ours in pairs)
        losses = [", ".join(f"{row[name]:.3f}" for row in of_search) for name in LOSSES]
        as_good = sum(ours["again"] <= row["again"] for row, ours in pairs)
        seconds = median(row["seconds"] for row in of_search)
        found.append(Compared(search, seconds, ratio, losses, as_good, len(pairs)))
    return found


def markdown(result: Row) -> str:
    """Return a page with a line for each search."""
    where = result["environment"]
    found = [
        (line.search, f"{line.seconds:.1f}", "" if line.faster is None else f"{line.faster:.1f}x", *line.losses)
        for line in compared(result["rows"])
    ]
    names = ["search", "seconds", "`tune` is faster", "test loss, handed back", *LOSSES[1:]]
    return f"""# A training loop of one's own

{where["cpu"]}, {where["cores"]} cores, torch {where["torch"]}, Ray {where["ray"]}, Optuna {where["optuna"]}, \
{where["date"]}. Rerun: `python -m benchmarks.own_loop`. {TRIALS} configurations of an MLP of three hidden layers \
{WIDTH} wide, digits, {EPOCHS} epochs. Medians of seconds and of their ratios; test losses for each seed. All searches \
hand back the best epoch by validation loss; "again" is the mean of {AGAIN} trainings of the configuration.

{columns(names, found)}
"""


def main() -> None:
    """Run the rows that are missing, and write all."""
    parser = options(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--searches", nargs="+", choices=list(SEARCHES), default=list(SEARCHES))
    given = parser.parse_args()
    path = given.out / FILE
    result = read(path, {"rows": []})
    for seed, search in itertools.product(given.seeds, given.searches):
        if not any((row["search"], row["seed"]) == (search, seed) for row in result["rows"]):
            result["environment"] = environment("torch", "ray", "optuna")
            result["rows"].append(measure(search, seed))
            save(path, result, markdown(result))
    save(path, result, markdown(result))


if __name__ == "__main__":
    main()
