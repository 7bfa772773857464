"""Do narrow models rank hyperparameters like the wide one? Hydro's study (section 5.4), on real data, with
and without muP.

Random configurations (batch size, learning rate, momentum, schedule) are trained at several width ratios,
once as muP surrogates and once as ordinary narrow models. Reported for each ratio: Spearman's rho with the
full width, and the regret of the top 1, 2, 3 in the full-size model's score, beside the spread of that score
between seeds.

    python -m benchmarks.transfer_quality digits --configs 50
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.result_files import Row, columns, cpu_model, environment, options, texts
from benchmarks.transfer_tasks import TASKS, Config, TransferTask, load_task, loss_of, score_of
from fusion import lr_factor
from surrogate import compare_rankings, make_surrogate
from surrogate.build import mark_as_target
from surrogate.training import make_optimizer

BATCH_SIZES = {"sgd": [32, 64, 128], "adamw": [16, 32, 64]}
LR_RANGE = {"sgd": (1e-4, 3.0), "adamw": (1e-5, 1e-1)}


def sample_configs(task: TransferTask, count: int, seed: int = 0) -> list[Config]:
    """Draw random configurations of the task's space, the same for the same seed."""
    rng = np.random.default_rng(seed)
    low, high = LR_RANGE[task.optimizer]
    momentum = "momentum" if task.optimizer == "sgd" else "beta1"
    return [
        {
            "optimizer": task.optimizer,
            "lr": float(np.exp(rng.uniform(np.log(low), np.log(high)))),
            momentum: float(rng.uniform(0.5, 0.99)),
            "batch_size": int(rng.choice(BATCH_SIZES[task.optimizer])),
            "schedule": str(rng.choice(["constant", "cosine", "exponential"])),
            "gamma": 0.5,
        }
        for _ in range(count)
    ]


def run_trial(task: TransferTask, config: Config, width_ratio: float, *, plain: bool, seed: int) -> float:
    """Train one configuration at one width, and return its validation score."""
    torch.manual_seed(seed)
    model = _ordinary(task, config, width_ratio) if plain else make_surrogate(task.model_fn, config, width_ratio)
    optimizer = make_optimizer(model, {"weight_decay": 0.0, **config})  # 0 in place of torch's default
    rates = [group["lr"] for group in optimizer.param_groups]
    x, y = task.train
    shuffle = torch.Generator().manual_seed(seed)
    model.train()
    for epoch in range(task.epochs):
        chunks = torch.randperm(len(x), generator=shuffle).split(config["batch_size"])
        for place, chunk in enumerate(chunks):
            factor = lr_factor(config, epoch + place / len(chunks), task.epochs, len(chunks))
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * factor
            optimizer.zero_grad()
            loss_of(model, x[chunk], y[chunk]).backward()
            optimizer.step()
    return score_of(task, model)


def _ordinary(task: TransferTask, config: Config, width_ratio: float) -> nn.Module:
    return mark_as_target(task.model_fn(config, width_ratio))


def study(task: TransferTask, configs: Sequence[Config], ratios: Sequence[float], seeds: int) -> dict[str, Any]:
    """Train everything and compare each narrow width with the full one."""
    wide = _scores(task, configs, 1.0, plain=True)
    spread = seed_spread(task, configs[_best(task, wide)], seeds)
    rows = []
    for ratio, scheme in [(1.0, "reseed"), *((ratio, scheme) for ratio in ratios for scheme in ("muP", "plain"))]:
        started = time.perf_counter()
        # The full width is also compared with itself under other seeds. No narrow model can rank better than that.
        first_seed = 10_000 if scheme == "reseed" else 0
        narrow = _scores(task, configs, ratio, plain=scheme != "muP", first_seed=first_seed)
        seconds = round(time.perf_counter() - started, 1)
        comparison = asdict(compare_rankings(narrow, wide, mode=task.mode, tolerance=spread))
        rows.append({"width_ratio": ratio, "scheme": scheme, "seconds": seconds, **comparison, "scores": narrow})
        print(_line(rows[-1]), flush=True)
    return {"wide_scores": wide, "seed_spread": spread, "rows": rows}


def seed_spread(task: TransferTask, config: Config, seeds: int) -> float:
    """Return the standard deviation of one configuration's full-size score over seeds."""
    scores = [run_trial(task, config, 1.0, plain=True, seed=1000 + seed) for seed in range(seeds)]
    return statistics.stdev(scores)


def _scores(
    task: TransferTask, configs: Sequence[Config], width_ratio: float, *, plain: bool, first_seed: int = 0
) -> list[float]:
    return [run_trial(task, config, width_ratio, plain=plain, seed=first_seed + i) for i, config in enumerate(configs)]


def _best(task: TransferTask, scores: Sequence[float]) -> int:
    sign = 1.0 if task.mode == "min" else -1.0
    return int(np.nanargmin([sign * score for score in scores]))


def _line(row: dict[str, Any]) -> str:
    regrets = "".join(f"{row['regret'][k]:>10.3g}" for k in (1, 2, 3))
    return f"{row['width_ratio']:>8.4g}  {row['scheme']:<7}{row['rho']:>8.3f}{regrets}  {row['verdict']}"


def study_environment() -> Row:
    """Return hardware, date and versions, and the number of threads that are used."""
    machine = f"{cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) used"
    return environment("torch", machine=machine)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw one panel for each scheme and ratio: the narrow model's score against the wide one's."""
    from matplotlib.figure import Figure

    narrow = [row for row in result["rows"] if row["scheme"] != "reseed"]
    rows = sorted(narrow, key=lambda row: (row["scheme"], -row["width_ratio"]))
    columns = len(rows) // 2
    figure = Figure(figsize=(3.0 * columns, 6.0), layout="constrained")
    for axis, row in zip(figure.subplots(2, columns, sharey=True, squeeze=False).flat, rows):
        axis.scatter(row["scores"], result["wide_scores"], s=10)
        axis.set(title=f"{row['scheme']}, width ratio {row['width_ratio']:g}, rho {row['rho']:.2f}")
        axis.set(xlabel=f"{result['score']} at that width", ylabel=f"{result['score']} at full width")
    figure.savefig(path, dpi=80)


def main() -> None:
    """Run one task and write `transfer_<task>.json` and `.png`."""
    parser = options(__doc__, data=True)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--configs", type=int, default=50)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1 / 2, 1 / 4, 1 / 8])
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the full-size model's spread")
    arguments = parser.parse_args()
    task = load_task(arguments.task, arguments.data)
    configs = sample_configs(task, arguments.configs)
    started = time.perf_counter()
    print("   ratio  scheme      rho  regret@1  regret@2  regret@3", flush=True)
    result = study(task, configs, arguments.ratios, arguments.seeds)
    result |= {"task": task.name, "score": task.score, "epochs": task.epochs, "train_samples": len(task.train[0])}
    result |= {"seconds": round(time.perf_counter() - started), "environment": study_environment(), "configs": configs}
    print(f"seed-to-seed spread at full width: {result['seed_spread']:.3g}; {result['seconds']} s in all")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"transfer_{task.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, arguments.out / f"transfer_{task.name}.png")
    write_page(arguments.out)


def write_page(folder: Path) -> None:
    """Write the results of all tasks that were run to `transfer_quality.md`, followed by `transfer_notes.md`."""
    found = [folder / f"transfer_{name}.json" for name in ("digits", "cifar10", "shakespeare")]
    tables = [_table(json.loads(path.read_text())) for path in found if path.exists()]
    notes = [path.read_text() for path in folder.glob("transfer_notes.md")]
    (folder / "transfer_quality.md").write_text("\n\n".join([texts("transfer_quality")["head"], *tables, *notes]))


def _table(result: dict[str, Any]) -> str:
    environment, unit = result["environment"], "points" if result["score"] == "accuracy" else "nats"
    rows = []
    for row in result["rows"]:
        scheme = {"reseed": "full width, other seeds"}.get(row["scheme"], row["scheme"])
        regrets = [f"{row['regret'][str(k)]:.3g}" for k in (1, 2, 3)]
        rows.append([f"{row['width_ratio']:g}", scheme, f"{row['rho']:.3f}", *regrets, row["verdict"]])
    title = f"## {result['task']}: {len(result['configs'])} configurations, {result['epochs']} epoch(s) of "
    title += f"{result['train_samples']} samples; spread between seeds {result['seed_spread']:.3g} {unit}"
    where = f"{environment['date']}, {environment['machine']}, Python {environment['python']}, torch "
    where += f"{environment['torch']}; {result['seconds']} s."
    names = ["width ratio", "", "rho", "regret@1", "regret@2", "regret@3", "verdict"]
    return "\n\n".join([title, where, columns(names, rows)])


if __name__ == "__main__":
    main()
