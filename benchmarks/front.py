"""Accuracy against MACs on CIFAR-10: the hypervolume that a search reaches at a cost, against Optuna's samplers.

    python -m benchmarks.front [--seeds 5] [--budgets 2 4 8] [--out FOLDER]

The space is conditional: depth x width of a CNN, and the optimizer with its own rates. Cost is counted in full
trainings of a configuration, never in seconds. A surrogate's epoch costs its share of the MACs of its own full size.
Optuna's TPE, NSGA-II and random sampler train one configuration after another to the end, as studies of several
objectives cannot prune. A training that begins within the budget counts. `tune` gets samples and finalists that fit
the budget; the table says what each method has spent. All methods keep the best epoch. Seeds whose rows are there are
not run again. It rewrites `front.{json,md}`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.result_files import Row, columns, environment, options, read, save
from benchmarks.transfer_tasks import cifar_images
from hydro_rasda import RaceConfig, SweepConfig, choice, loguniform, tune, uniform
from hydro_rasda.schedulers.pareto import hypervolume

FILE = "front.json"
DEPTHS, WIDTHS, EPOCHS, BATCH, SIDE, RATIO = (1, 2, 3), (16, 32, 64), 6, 64, 16, 1 / 2
SPACE: dict[str, Any] = {
    "depth": choice(DEPTHS),
    "width": choice(WIDTHS),
    "by": choice(
        [
            {"optimizer": "sgd", "lr": loguniform(1e-2, 1), "momentum": uniform(0.5, 0.98)},
            {"optimizer": "adamw", "lr": loguniform(1e-4, 3e-2)},
        ]
    ),
    "batch_size": BATCH,
    "schedule": "linear",
}
PLANS: Mapping[int, dict[str, Any]] = {
    2: {"num_samples": 12, "full_trainings": 1.0, "race": RaceConfig(top_k=2)},
    4: {"num_samples": 24, "full_trainings": 2.0, "race": RaceConfig(top_k=4)},
    8: {"num_samples": 40, "full_trainings": 5.0, "race": RaceConfig(top_k=8)},
}
"""The arguments of `tune` for a budget in full trainings."""
Data = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
Trained = Iterator[tuple[float, float, float]]
"""Cost in full trainings until then, the error and the MACs of each model that was trained."""


def model_fn(config: Mapping[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """Blocks of convolution, GroupNorm and pooling; the widths double."""
    widths = [3, *(int(config["width"] * width_ratio) * 2**i for i in range(config["depth"]))]
    blocks = [
        layer
        for i, o in pairwise(widths)
        for layer in (nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def macs_of(config: Mapping[str, Any], width_ratio: float = 1.0) -> float:
    """Multiply-accumulates of an example's evaluation."""
    widths = [3, *(int(config["width"] * width_ratio) * 2**i for i in range(config["depth"]))]
    sides = [SIDE // 2**i for i in range(config["depth"])]
    return float(sum(9 * i * o * side**2 for (i, o), side in zip(pairwise(widths), sides)) + 10 * widths[-1])


REFERENCE = (0.9, 1.01 * max(macs_of({"depth": depth, "width": width}) for depth in DEPTHS for width in WIDTHS))
"""Error and MACs: chance, and the largest model."""


def load(path: Path, examples: int) -> Data:
    """Images of 16 x 16 pixels."""
    parts = [cifar_images(path, "train", 0, examples), cifar_images(path, "train", 40_000, 41_000)]
    (x, y), (x_val, y_val) = ((F.avg_pool2d(images, 2), labels) for images, labels in parts)
    return (x, y), (x_val, y_val)


def trained(config: Mapping[str, Any], data: Data, seed: int) -> float:
    """Train one configuration to the end as anybody would; return the lowest validation error of its epochs."""
    torch.manual_seed(seed)
    (x, y), (x_val, y_val) = data
    model = model_fn(config)
    if config["optimizer"] == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    steps = EPOCHS * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    errors = []
    for _ in range(EPOCHS):
        model.train()
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            errors.append(1 - float((model(x_val).argmax(1) == y_val).float().mean()))
    return min(errors)


def suggested(trial: Any) -> dict[str, Any]:
    """The same space, define-by-run."""
    config = {
        "depth": trial.suggest_categorical("depth", DEPTHS),
        "width": trial.suggest_categorical("width", WIDTHS),
        "optimizer": trial.suggest_categorical("optimizer", ["sgd", "adamw"]),
    }
    if config["optimizer"] == "sgd":
        config["lr"] = trial.suggest_float("sgd_lr", 1e-2, 1, log=True)
        return {**config, "momentum": trial.suggest_float("momentum", 0.5, 0.98)}
    return {**config, "lr": trial.suggest_float("adamw_lr", 1e-4, 3e-2, log=True)}


def by_optuna(sampler: Any, data: Data, seed: int, budget: float) -> Trained:
    """One full training after another."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler(seed=seed))
    spent = 0.0
    while spent < budget:
        trial = study.ask()
        config = suggested(trial)
        error, macs = trained(config, data, seed), macs_of(config)
        study.tell(trial, [error, macs])
        spent += 1.0
        yield spent, error, macs


def by_tune(data: Data, seed: int, budget: int) -> Trained:
    """One call of `tune`; its surrogates' epochs cost what narrow models do."""
    with tempfile.TemporaryDirectory() as folder:
        result = tune(
            model_fn,
            SPACE,
            train_data=data[0],
            val_data=data[1],
            metric=["val_accuracy", "macs"],
            mode=["max", "min"],
            max_t=EPOCHS,
            sweep=SweepConfig(surrogate=RATIO),
            storage_path=folder,
            name="run",
            seed=seed,
            progress=False,
            **PLANS[budget],
        )
    shares = {trial.trial: macs_of(trial.config, RATIO) / macs_of(trial.config) for trial in result.trials}
    spent = sum(trial.epochs + trial.surrogate_epochs * shares[trial.trial] for trial in result.trials) / EPOCHS
    for trial in result.trials:
        if trial.epochs:
            yield spent, 1 - trial.metrics["val_accuracy"], trial.metrics["macs"]


def rows_of(name: str, found: Callable[[int], Trained], seed: int, budgets: Sequence[int]) -> Iterator[Row]:
    """The hypervolume of a method at each budget, as a share of the box between zero and the reference."""
    box = REFERENCE[0] * REFERENCE[1]
    for budget in budgets:
        models = [*found(budget)]
        volume = hypervolume([(error, macs) for _, error, macs in models], REFERENCE) / box
        yield {"method": name, "seed": seed, "budget": budget, "volume": volume, "cost": max(at for at, *_ in models)}


def means(rows: Sequence[Row], name: str, budget: int) -> tuple[float, float]:
    """Return a method's hypervolume and cost at a budget, means over seeds."""
    of = [row for row in rows if (row["method"], row["budget"]) == (name, budget)]
    return fmean(row["volume"] for row in of), fmean(row["cost"] for row in of)


def markdown(result: Row) -> str:
    """Means over seeds: a line for each method, a column for each budget."""
    where, rows = result["environment"], result["rows"]
    budgets = sorted({row["budget"] for row in rows})
    names = dict.fromkeys(row["method"] for row in rows)
    shown = [[name, *("{:.3f} (cost {:.1f})".format(*means(rows, name, of)) for of in budgets)] for name in names]
    return f"""# Accuracy against MACs

{where["cpu"]}, torch {where["torch"]}, {where["date"]}. Rerun: `{where["command"]}`. CIFAR-10 at \
{SIDE} x {SIDE} pixels, {where["examples"]} images to train on, 1,000 to validate; {EPOCHS} epochs. The \
hypervolume of error and MACs is a share of the box up to chance and the largest model. It is the mean over \
seeds, with the cost that was spent in full trainings. Optuna's samplers draw their first trials at random, \
with one seed the same ones, so that they coincide at these budgets.

{columns(["method", *(f"{budget} trainings" for budget in budgets)], shown)}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all methods and write the files."""
    import optuna

    parser = options(__doc__, data=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budgets", type=int, nargs="+", default=[2, 4, 8], choices=[*PLANS])
    parser.add_argument("--examples", type=int, default=2000)
    asked = parser.parse_args(arguments)
    data, samplers, path = load(asked.data, asked.examples), optuna.samplers, asked.out / FILE
    kinds = {"TPE": samplers.TPESampler, "NSGA-II": samplers.NSGAIISampler, "random": samplers.RandomSampler}
    rows: list[Row] = read(path, {"rows": []})["rows"]
    for seed in sorted({*range(asked.seeds)} - {row["seed"] for row in rows}):
        rows += rows_of("tune", partial(by_tune, data, seed), seed, asked.budgets)
        for name, kind in kinds.items():
            # One long study has the shorter ones as its beginnings.
            whole = [*by_optuna(kind, data, seed, max(asked.budgets))]

            def within(budget: int, whole: Sequence[tuple[float, float, float]] = whole) -> Trained:
                began = [0.0, *(at for at, *_ in whole)]
                return (one for one, before in zip(whole, began) if before < budget)

            rows += rows_of(f"Optuna, {name}", within, seed, asked.budgets)
        print(json.dumps(rows[-4 * len(asked.budgets) :]), flush=True)
        where = environment("torch", command="python -m benchmarks.front", examples=f"{asked.examples:,}")
        result = {"environment": where, "rows": rows}
        save(path, result, markdown(result))


if __name__ == "__main__":
    main()
