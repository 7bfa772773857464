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

from benchmarks.result_files import Row, cpu_model, environment, options
from benchmarks.transfer_tasks import TASKS, Config, Task, load_task, loss_of, score_of
from fusion import lr_factor
from surrogate import compare_rankings, make_surrogate
from surrogate.build import mark_as_target
from surrogate.training import make_optimizer

BATCH_SIZES = {"sgd": [32, 64, 128], "adamw": [16, 32, 64]}
LR_RANGE = {"sgd": (1e-4, 3.0), "adamw": (1e-5, 1e-1)}


def sample_configs(task: Task, count: int, seed: int = 0) -> list[Config]:
    """Random configurations of the task's space, the same for the same seed."""
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


def run_trial(task: Task, config: Config, width_ratio: float, *, plain: bool, seed: int) -> float:
    """Train one configuration at one width; its validation score."""
    torch.manual_seed(seed)
    model = _ordinary(task, config, width_ratio) if plain else make_surrogate(task.model_fn, config, width_ratio)
    optimizer = make_optimizer(model, {"weight_decay": 0.0, **config})  # not torch's default
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


def _ordinary(task: Task, config: Config, width_ratio: float) -> nn.Module:
    return mark_as_target(task.model_fn(config, width_ratio))


def study(task: Task, configs: Sequence[Config], ratios: Sequence[float], seeds: int) -> dict[str, Any]:
    """Train everything and compare each narrow width with the full one."""
    wide = _scores(task, configs, 1.0, plain=True)
    spread = seed_spread(task, configs[_best(task, wide)], seeds)
    rows = []
    for ratio, scheme in [(1.0, "reseed"), *((ratio, scheme) for ratio in ratios for scheme in ("muP", "plain"))]:
        started = time.perf_counter()
        # The full width against itself under other seeds: no narrow model can be expected to rank better than that.
        first_seed = 10_000 if scheme == "reseed" else 0
        narrow = _scores(task, configs, ratio, plain=scheme != "muP", first_seed=first_seed)
        seconds = round(time.perf_counter() - started, 1)
        comparison = asdict(compare_rankings(narrow, wide, mode=task.mode, tolerance=spread))
        rows.append({"width_ratio": ratio, "scheme": scheme, "seconds": seconds, **comparison, "scores": narrow})
        print(_line(rows[-1]), flush=True)
    return {"wide_scores": wide, "seed_spread": spread, "rows": rows}


def seed_spread(task: Task, config: Config, seeds: int) -> float:
    """Standard deviation of one configuration's full-size score over seeds."""
    scores = [run_trial(task, config, 1.0, plain=True, seed=1000 + seed) for seed in range(seeds)]
    return statistics.stdev(scores)


def _scores(
    task: Task, configs: Sequence[Config], width_ratio: float, *, plain: bool, first_seed: int = 0
) -> list[float]:
    return [run_trial(task, config, width_ratio, plain=plain, seed=first_seed + i) for i, config in enumerate(configs)]


def _best(task: Task, scores: Sequence[float]) -> int:
    sign = 1.0 if task.mode == "min" else -1.0
    return int(np.nanargmin([sign * score for score in scores]))


def _line(row: dict[str, Any]) -> str:
    regrets = "".join(f"{row['regret'][k]:>10.3g}" for k in (1, 2, 3))
    return f"{row['width_ratio']:>8.4g}  {row['scheme']:<7}{row['rho']:>8.3f}{regrets}  {row['verdict']}"


def study_environment() -> Row:
    """Hardware, day and versions, and the threads that are used."""
    machine = f"{cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) used"
    return environment("torch", machine=machine)


def plot(result: dict[str, Any], path: Path) -> None:
    """One panel for each scheme and ratio: the narrow model's score against the wide one's."""
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
    """Render what is there of all tasks as `transfer_quality.md`, followed by `transfer_notes.md`."""
    found = [folder / f"transfer_{name}.json" for name in ("digits", "cifar10", "shakespeare")]
    tables = [_table(json.loads(path.read_text())) for path in found if path.exists()]
    tables += _parts(folder)
    notes = [path.read_text() for path in folder.glob("transfer_notes.md")]
    (folder / "transfer_quality.md").write_text("\n\n".join([_HEAD, *tables, *notes]))


_HEAD = """# Do narrow models rank hyperparameters like the wide one?

Random configurations (batch size, learning rate, momentum or beta1, schedule) are trained at full width as ordinary
models. At narrow widths, they are trained as muP surrogates and as plain narrow models. The column *rho* is Spearman's
rank correlation of the final validation scores with the full width's. The column *regret@k* compares the best of the
narrow model's top k with the best configuration of all, both at full width. It is in points of accuracy, or in nats of
loss. *Other seeds*: the full width against itself under other seeds, which no narrow model can be expected to beat. The
spread is the standard deviation of the best configuration's full-size score over 5 seeds. Configurations and all scores
are in `transfer_<task>.json`, scatter plots in `transfer_<task>.png`. Rerun: `python -m benchmarks.transfer_quality
<task>`."""


def _table(result: dict[str, Any]) -> str:
    environment, unit = result["environment"], "points" if result["score"] == "accuracy" else "nats"
    lines = [
        f"## {result['task']}: {len(result['configs'])} configurations, {result['epochs']} epoch(s) of "
        f"{result['train_samples']} samples; spread between seeds {result['seed_spread']:.3g} {unit}",
        "",
        f"{environment['date']}, {environment['machine']}, Python {environment['python']}, torch "
        f"{environment['torch']}; {result['seconds']} s.",
        "",
        "| width ratio | | rho | regret@1 | regret@2 | regret@3 | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        scheme = {"reseed": "full width, other seeds"}.get(row["scheme"], row["scheme"])
        regrets = " | ".join(f"{row['regret'][str(k)]:.3g}" for k in (1, 2, 3))
        lines.append(f"| {row['width_ratio']:g} | {scheme} | {row['rho']:.3f} | {regrets} | {row['verdict']} |")
    return "\n".join(lines)


def _parts(folder: Path) -> list[str]:
    """Render the studies of `benchmarks.transfer_parts`: means over their seeds, as three tables."""
    found = [json.loads(path.read_text()) for path in sorted((folder / "transfer_parts").glob("*.json"))]
    results = [result for result in found if result["optimizer"] != "decay"]
    if not results:
        return []
    of: dict[tuple[str, str, float, float, float], list[dict[str, Any]]] = {}
    for result in results:
        for row in result["rows"]:
            key = result["task"], result["optimizer"], row["width"], row["depth"], row["factor"]
            of.setdefault(key, []).append(row)
    lines = [
        _PARTS_HEAD,
        f"{results[0]['environment']['date']}, {results[0]['environment']['machine']}.",
        "",
        "| task | optimizer | seeds | width | depth | branches | price | rho | regret@1 | regret@4 | best at place |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (task, kind, width, depth, factor), rows in of.items():
        price, rho = (statistics.mean(row[name] for row in rows) for name in ("cost", "rho"))
        regrets = " | ".join(f"{statistics.mean(row['regret'][k] for row in rows):.3f}" for k in (0, 1))
        places = ", ".join(str(row["place"]) for row in rows)
        sizes = f"{width:g} | {depth:g} | x{factor:g}"
        lines.append(f"| {task} | {kind} | {len(rows)} | {sizes} | {price:.3f} | {rho:.2f} | {regrets} | {places} |")
    tried = {result["task"]: result["embedding"] for result in results if "embedding" in result}
    decays = [result for result in found if result["optimizer"] == "decay"]
    return ["\n".join(lines), *([_embedding(tried)] if tried else []), *([_decays(decays)] if decays else [])]


def _decays(results: list[dict[str, Any]]) -> str:
    of: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for result in results:
        for row in result["rows"]:
            of.setdefault((result["task"], row["width"], row["rule"]), []).append(row)
    lines = [
        _DECAYS_HEAD,
        "| task | seeds | width | rule | rho | regret@1 | regret@4 | best at place | decay of the best, in octaves |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (task, width, rule), rows in of.items():
        rho, higher = (statistics.mean(row[name] for row in rows) for name in ("rho", "higher"))
        regrets = " | ".join(f"{statistics.mean(row['regret'][k] for row in rows):.3f}" for k in (0, 1))
        places = ", ".join(str(row["place"]) for row in rows)
        lines.append(
            f"| {task} | {len(rows)} | {width:g} | {rule} | {rho:.2f} | {regrets} | {places} | {higher:+.1f} |"
        )
    return "\n".join(lines)


def _embedding(tried: dict[str, list[dict[str, Any]]]) -> str:
    multipliers = [row["multiplier"] for row in next(iter(tried.values()))]
    lines = [
        _EMBEDDING_HEAD,
        f"| task | {' | '.join(f'x{multiplier:g}' for multiplier in multipliers)} |",
        "|---|" + "---|" * len(multipliers),
    ]
    for task, rows in tried.items():
        lines.append(f"| {task} | {' | '.join(format(min(row['losses']), '.3f') for row in rows)} |")
    return "\n".join(lines)


_PARTS_HEAD = """## Muon, rates by part, and depth

Residual models of four blocks, or of eight: an MLP 256 wide (digits), a transformer 64 wide (shakespeare), a CNN of 32
channels (CIFAR-10). 24 configurations for each seed, 2 to 6 epochs, a linear decay, batches of 32. AdamW has learning
rates of embedding and head between 1/8 and 8 times `lr`. Muon has an `lr.adamw` between these. All surrogates of a row
train as one fused model. The column *branches* is the factor of residual branches: x2 at half the depth is CompleteP's
rule. The column *price* is CPU time over that of the full-size models. Regrets are in nats of validation loss. The last
column is the place of the full-size model's best configuration in the surrogates' ranking, for each seed. Rerun:
`python -m benchmarks.transfer_parts <task>`.
"""

_EMBEDDING_HEAD = """### The embedding's learning rate at full size

Best validation loss in nats over four learning rates of AdamW, for three multipliers of the embedding's rate.
"""

_DECAYS_HEAD = """### Weight decay of surrogates

24 configurations of AdamW for each seed, with weight decays from 1/16 to 8, on a quarter of the data for four times the
epochs, so that models overfit. A rule gives the factor of a surrogate's weight decay at width ratio m. Hidden matrices
have 1/m times the learning rate there, all other parameters the same:

| rule | source | hidden matrices | others |
|---|---|---|---|
| product | learning rate x weight decay is equal at all widths (arXiv:2510.19093); the default | m | 1 |
| root | weight decay in proportion to the root of the width (arXiv:2510.15262) | sqrt(m) | 1 |
| decay | weight decay is equal at all widths (AdamW's own, under muP) | 1 | 1 |
| inverse | learning rate x weight decay in proportion to 1 / width (arXiv:2512.05620) | 1 | 1/m |

The last column says how many octaves higher the weight decays of the surrogates' best six configurations are than those
of the full-size model's best six. *Other seeds* is full size against itself. Regrets are in nats. Rerun: `python -m
benchmarks.transfer_parts <task> --decay`.
"""


if __name__ == "__main__":
    main()
