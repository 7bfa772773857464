"""`tune` over folds of few examples, against ASHA on one split and against cross-validation one after another.

    python -m benchmarks.folds [--tasks breast_cancer_splits] [--methods tune cross_validation] [--seeds 0 1 2]

Each cell (task, method, seed) is kept in `results/folds/`; what is there is not run again (`--again` does). The tasks
and ASHA's cells are those of `benchmarks.vs_asha`, of the same seed and so the same split. ASHA trains on one part of
the labelled examples, and validates on the other. The methods here:

- `tune`: `val_data=StratifiedKFold(5)` (breast cancer) or `KFold(5)` (diabetes) over all labelled examples.
- `tune_on_train`: the same over ASHA's training examples alone, without its validation examples.
- `cross_validation`: each configuration trains on each fold at full size, one after another; the best mean trains once
  more on all. That is scikit-learn's `RandomizedSearchCV` with one process, in plain torch.

Then, and with `--render` alone, `results/folds.md` is drawn from all cells that are there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch._dynamo  # Which torch would import with the first optimizer: no part of a search.
from torch import nn

from benchmarks.result_files import DEFAULT_DATA, RESULTS
from benchmarks.tasks.load import load_task
from benchmarks.tasks.task import Batch, Config, Task, held, objective
from benchmarks.vs_asha.cell import environment_of
from benchmarks.vs_asha.search import configurations, seeds
from benchmarks.vs_asha.statistics import BASELINE, seed_spread
from benchmarks.vs_asha.training import build, scores, train
from hydro_rasda import tune

TASKS = ("breast_cancer_splits", "diabetes_splits")
FOLDS = 5
SEEDS = range(15)
PLAIN = "cross_validation"
QUIET = 0.15
"""Times count of cells before which other work took at most this share of the cores."""
TARGET_SHARE, TARGET_SPEEDUP = 0.95, 3.0

Cell = dict[str, Any]
Found = tuple[int, Config, nn.Module]
"""Of a search: the winner's number and configuration, and its model."""


def splitter(task: Task) -> Any:
    """The splitter of a task, as a user would choose it."""
    from sklearn.model_selection import KFold, StratifiedKFold

    return (KFold if task.kind == "field" else StratifiedKFold)(FOLDS)


def labelled(task: Task) -> Batch:
    """All examples that a search may see: those that ASHA trains on, then those that it validates on."""
    validates = task.held[-1][:, 0] > 0
    return tuple(torch.cat([own, other[validates]]) for own, other in zip(task.train, task.held))


def tuned(task: Task, examples: Batch, seed: int) -> Found:
    """`tune` with its defaults, over folds of these examples; widths of groups are measured in the run."""
    with tempfile.TemporaryDirectory(prefix="folds-") as folder:
        os.environ["HYDRO_RASDA_CACHE"] = folder
        result = tune(
            task.model_fn,
            task.space(),
            train_data=examples,
            val_data=splitter(task),
            objective=objective(task.kind),
            num_samples=task.num_samples,
            max_t=task.max_t,
            storage_path=folder,
            name="run",
            seed=seed,
            progress=False,
        )
        return result.best_trial, result.best_config, result.best_model()


def cross_validated(task: Task, examples: Batch, seed: int) -> Found:
    """Random search, each configuration on each fold, one after another; the best trains once more on all examples."""
    rows = [*splitter(task).split(examples[0].numpy(), examples[1].numpy())]
    parts = [[tuple(of[torch.as_tensor(at)] for of in examples) for at in fold] for fold in rows]
    means = []
    for number, config in enumerate(configurations(task, seed)):
        ends = []
        for training, validation in parts:
            one = replace(task, train=training, held=held(validation, validation))
            given = seeds(one, number, seed)
            *_, last = train(one, config, given, build(one, config, given))
            ends.append(last["score"])
        means.append(fmean(ends))
    winner = min(
        range(len(means)), key=lambda number: means[number] if means[number] == means[number] else float("inf")
    )
    config, given = configurations(task, seed)[winner], seeds(task, winner, seed)
    model, whole = build(task, config, given), replace(task, train=examples)
    for _ in train(whole, config, given, model):
        pass
    return winner, config, model


METHODS: Mapping[str, Callable[[Task, int], Found]] = {
    "tune": lambda task, seed: tuned(task, labelled(task), seed),
    "tune_on_train": lambda task, seed: tuned(task, task.train, seed),
    "cross_validation": lambda task, seed: cross_validated(task, labelled(task), seed),
}


def measure(name: str, method: str, seed: int) -> Cell:
    """Run a search; the time is from the call to the trained model in hand."""
    task = load_task(name, Path(DEFAULT_DATA)).of_seed(seed)
    environment = environment_of("torch", "numpy", "scikit-learn")
    began = time.perf_counter()
    winner, config, model = METHODS[method](task, seed)
    wall = time.perf_counter() - began
    test = scores(task, model, config["batch_size"])["test"]
    found = {"trial": winner, "config": config, "test": float(f"{test:.6g}")}
    return {
        "task": name,
        "method": method,
        "seed": seed,
        "wall": round(wall, 3),
        "winner": found,
        "examples": {"labelled": len(labelled(task)[0]), "train": len(task.train[0])},
        "trials": task.num_samples,
        "max_t": task.max_t,
        "folds": FOLDS,
        "environment": environment,
    }


def read(folder: Path) -> list[Cell]:
    """All cells of a folder, in the order of tasks, methods and seeds."""
    cells = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(cells, key=lambda cell: (cell["task"], [*METHODS].index(cell["method"]), cell["seed"]))


def compared(cells: Sequence[Cell], results: Path) -> Iterator[dict[str, Any]]:
    """Compare each task and method with ASHA's winners, of the same seeds, and with cross-validation."""
    for (task, method), group in itertools.groupby(cells, key=lambda cell: (cell["task"], cell["method"])):
        own = {cell["seed"]: cell for cell in group}
        everything = [json.loads(path.read_text()) for path in (results / "vs_asha").glob(f"{task}-*.json")]
        spread = seed_spread(everything)
        base = {cell["seed"]: cell["winner"]["test"] for cell in everything if cell["method"] == BASELINE}
        there = sorted(own.keys() & base.keys())
        plain = _walls(cell for cell in cells if (cell["task"], cell["method"]) == (task, PLAIN))
        walls = _walls(own.values())
        yield {
            "task": task,
            "method": method,
            "runs": len(there),
            "not_worse": sum(own[seed]["winner"]["test"] <= base[seed] + spread for seed in there),
            "better": sum(own[seed]["winner"]["test"] < base[seed] for seed in there),
            "test": median(own[seed]["winner"]["test"] for seed in there),
            "base": median(base[seed] for seed in there),
            "spread": spread,
            "wall": median(walls.values()) if walls else None,
            "speedups": sorted(plain[seed] / walls[seed] for seed in walls if seed in plain and method != PLAIN),
            "environment": own[min(own)]["environment"],
        }


def _walls(cells: Iterable[Cell]) -> dict[int, float]:
    """Return the seconds of each seed that was timed on a quiet machine."""
    return {cell["seed"]: cell["wall"] for cell in cells if cell["environment"]["busy before"] <= QUIET}


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw the page of these comparisons."""
    text = __doc__.partition("Each cell")[2] if __doc__ else ""
    lines = [
        "# `tune` over folds of few examples",
        "",
        "*`python -m benchmarks.folds` draws this page from `results/folds/`.*",
        "",
        f"Each cell{text.partition('Then, and')[0].rstrip()}",
        "",
        "A run is no worse than ASHA's of the same split if its test score is worse by at most the spread of seeds.",
        f"Times are of cells before which other work took at most {QUIET:.0%} of the cores.",
        "",
        "| task | method | no worse than ASHA | better | test | ASHA's test | seed spread | seconds | times as fast as "
        "cross-validation |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        speed, seconds = row["speedups"], f"{row['wall']:.1f}" if row["wall"] is not None else "not timed"
        fast = f"{median(speed):.1f} [{speed[0]:.1f}, {speed[-1]:.1f}], {len(speed)} seeds" if speed else ""
        lines.append(
            f"| {row['task']} | `{row['method']}` | {row['not_worse']} of {row['runs']} | {row['better']} | "
            f"{row['test']:.4g} | {row['base']:.4g} | {row['spread']:.2g} | {seconds} | {fast} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cells that are missing, and draw the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--again", action="store_true", help="run cells that are there, too")
    parser.add_argument("--render", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of `folds/` and the page")
    given = parser.parse_args(arguments)
    folder = given.out / "folds"
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed, method in itertools.product(given.tasks, given.seeds, given.methods):
        path = folder / f"{name}-{method}-{seed}.json"
        if given.render or (path.exists() and not given.again):
            continue
        cell = measure(name, method, seed)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(cell, indent=1) + "\n")
        temporary.replace(path)
        print(f"{name} {method} {seed}: {cell['wall']:.0f} s, test {cell['winner']['test']}", flush=True)
    (given.out / "folds.md").write_text(page([*compared(read(folder), RESULTS)]))


if __name__ == "__main__":
    main()
