"""Do narrow models rank configurations of Muon, rates by part, and deep models, and do shallow ones?

Residual models of four blocks train at full size by AdamW, with learning rates of their own for embedding and head, and
by Muon. The same configurations train as one fused surrogate at several widths and depths. A shallow surrogate
multiplies its residual branches by 1 / depth ratio (CompleteP, arXiv:2505.01618, table 1 with alpha = 1), or does not.
A study of its own compares rules for the weight decay of surrogates. Times are CPU seconds of this process.

    python -m benchmarks.transfer_parts digits --seed 0
    python -m benchmarks.transfer_parts digits --decay
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from benchmarks.result_files import options
from benchmarks.transfer_quality import study_environment, write_page
from benchmarks.transfer_tasks import Config, Task, cifar_images, digits, loss_of, shakespeare_tokens, windows
from fusion import fuse, fused_optimizer, lr_factor
from fusion.optim import OPTIMIZERS, optimizer
from surrogate import compare_rankings, lr_multipliers, make_surrogate, weight_decay_multipliers

BLOCKS = 4
BATCH = 32
SIZES = ((1 / 4, 1.0), (1 / 8, 1.0), (1 / 4, 1 / 2), (1 / 8, 1 / 2))
EMBEDDING = (1.0, 4.0, 16.0)
"""Multipliers of the embedding's learning rate that are tried at full size (arXiv:2605.21486)."""

DECAYS: dict[str, Callable[[float, float], float]] = {
    "root": lambda rate, width: 1 / math.sqrt(rate),
    "decay": lambda rate, width: 1.0,
    "inverse": lambda rate, width: 1 / (rate * width),
}
"""Other rules for the decay of a surrogate: (factor of the learning rate, width ratio) -> factor of the weight decay.

By the library's own rule ("product", arXiv:2510.19093), learning rate x weight decay is equal at all widths. By
"inverse" (arXiv:2512.05620), it is in proportion to 1 / width. The weight decay is in proportion to the root of the
width where the learning rate is to 1 / width ("root", arXiv:2510.15262), or equal at all widths ("decay", as AdamW does
with muP's learning rates).
"""

Build = Callable[[float, float, float], nn.Module]
"""`build(width_ratio, depth_ratio, factor)`; residual branches are multiplied by the factor."""


class Residual(nn.Module):
    """x + factor * branch(x)."""

    def __init__(self, branch: nn.Module, factor: float) -> None:
        super().__init__()
        self.branch, self.factor = branch, factor

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        out: Tensor = x + self.factor * self.branch(x)
        return out


class Attention(nn.Module):
    """Causal self-attention with heads of 8 over [N, T, width]."""

    mask: Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, width // 8, batch_first=True)
        mask = torch.full((length, length), -math.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        out: Tensor = self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]
        return out


class Net(nn.Module):
    """Embedding, residual blocks, norm, head."""

    def __init__(self, embedding: nn.Module, blocks: Sequence[nn.Module], norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks, self.norm, self.head = embedding, nn.Sequential(*blocks), norm, head

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, ..., classes]."""
        out: Tensor = self.head(self.norm(self.blocks(self.embedding(x))))
        return out


def _mlp(width_ratio: float, depth_ratio: float, factor: float) -> nn.Module:
    width = int(256 * width_ratio)

    def branch() -> nn.Module:
        inner = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        return nn.Sequential(nn.LayerNorm(width), *inner)

    blocks = [Residual(branch(), factor) for _ in range(int(BLOCKS * depth_ratio))]
    return Net(nn.Linear(64, width), blocks, nn.LayerNorm(width), nn.Linear(width, 10))


def _transformer(vocabulary: int, length: int, width_ratio: float, depth_ratio: float, factor: float) -> nn.Module:
    width = int(64 * width_ratio)
    blocks: list[nn.Module] = []
    for _ in range(int(BLOCKS * depth_ratio)):
        perceptron = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        attention = nn.Sequential(nn.LayerNorm(width), Attention(width, length))
        blocks += [Residual(attention, factor), Residual(nn.Sequential(nn.LayerNorm(width), *perceptron), factor)]
    return Net(nn.Embedding(vocabulary, width), blocks, nn.LayerNorm(width), nn.Linear(width, vocabulary))


def _cnn(width_ratio: float, depth_ratio: float, factor: float) -> nn.Module:
    width = int(32 * width_ratio)

    def branch() -> nn.Module:
        parts = [(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
        return nn.Sequential(*(layer for part in parts for layer in part))

    blocks = [Residual(branch(), factor) for _ in range(int(BLOCKS * depth_ratio))]
    pooled = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Net(nn.Conv2d(3, width, 3, padding=1), blocks, pooled, nn.Linear(width, 10))


def load(name: str, data: Path) -> tuple[Task, Build]:
    """Return data and model of a task; the model of the `Task` is its full-size one."""
    if name == "digits":
        task = digits(data)
        return Task(name, lambda config, ratio: _mlp(ratio, 1.0, 1.0), task.train, task.val, 6, "adamw", "loss"), _mlp
    if name == "shakespeare":
        tokens, vocabulary = shakespeare_tokens(data)
        train, val = windows(tokens, 0, 800), windows(tokens, 1_000_000, 100)
        build = functools.partial(_transformer, vocabulary, train[0].shape[1])
        return Task(name, lambda config, ratio: build(ratio, 1.0, 1.0), train, val, 2, "adamw", "loss"), build
    (x, y), (x_val, y_val) = cifar_images(data, "train", 0, 1000), cifar_images(data, "test", 0, 500)
    train, val = (avg_pool2d(x, 4), y), (avg_pool2d(x_val, 4), y_val)
    return Task(name, lambda config, ratio: _cnn(ratio, 1.0, 1.0), train, val, 3, "adamw", "loss"), _cnn


def sample(kind: str, count: int, seed: int = 0) -> list[Config]:
    """Random configurations of AdamW with rates by part, or of Muon with AdamW's rate, the same for the same seed."""
    rng = np.random.default_rng(seed)

    def one() -> Config:
        lr = float(2 ** rng.uniform(-12, -4))
        first, second = (float(lr * 2 ** rng.uniform(-3, 3)) for _ in range(2))
        own = {"lr.embedding": first, "lr.head": second} if kind == "adamw" else {"lr.adamw": first}
        key = "beta1" if kind == "adamw" else "momentum"
        return {"optimizer": kind, "lr": lr, **own, key: float(rng.uniform(0.6, 0.98)), "schedule": "linear"}

    return [one() for _ in range(count)]


def sample_decays(count: int, seed: int = 0) -> list[Config]:
    """Random configurations of AdamW with weight decays that matter, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return [
        {
            "optimizer": "adamw",
            "lr": float(2 ** rng.uniform(-10, -5)),
            "weight_decay": float(2 ** rng.uniform(-4, 3)),
            "schedule": "linear",
        }
        for _ in range(count)
    ]


def train_wide(task: Task, config: Config, seed: int) -> float:
    """Train one configuration at full size; its validation loss."""
    torch.manual_seed(seed)
    model = task.model_fn(config, 1.0).train()
    made = optimizer(model, {"weight_decay": 0.0, **config})
    rates = [group["lr"] for group in made.param_groups]
    for x, y, time_passed, steps in _batches(task):
        for group, rate in zip(made.param_groups, rates):
            group["lr"] = rate * lr_factor(config, time_passed, task.epochs, steps)
        made.zero_grad()
        loss_of(model, x, y).backward()
        made.step()
    model.eval()
    with torch.no_grad():
        return cross_entropy(model(task.val[0]).flatten(0, -2), task.val[1].flatten()).item()


def train_narrow(
    task: Task,
    build: Build,
    configs: Sequence[Config],
    size: tuple[float, float],
    factor: float = 1.0,
    decay: str = "product",
) -> list[float]:
    """Train all configurations as one fused surrogate; their validation losses."""
    models = []
    for seed, config in enumerate(configs):
        torch.manual_seed(seed)
        models.append(make_surrogate(lambda _, ratio: build(ratio, size[1], factor), config, size[0]))
    kinds = (*OPTIMIZERS, "muon.original")
    rates = {kind: lr_multipliers(models[0], kind) for kind in kinds if kind != "own"}
    decays = {kind: weight_decay_multipliers(models[0], kind) for kind in rates}
    if decay != "product":
        decays = {kind: {name: DECAYS[decay](rate, size[0]) for name, rate in of.items()} for kind, of in rates.items()}
    fused = fuse(models)
    settings = [{"weight_decay": 0.0, **config} for config in configs]
    made = fused_optimizer(fused, settings, lr_multipliers=rates, weight_decay_multipliers=decays)
    fused.train()
    for x, y, time_passed, steps in _batches(task):
        made.schedule([[lr_factor(config, time_passed, task.epochs, steps) for config in configs]])
        made.zero_grad()
        fused.map(lambda model, batch: loss_of(model, *batch), (x, y)).sum().backward()
        made.step()
    fused.eval()
    with torch.no_grad():
        losses: list[float] = fused.map(lambda model, batch: loss_of(model, *batch), task.val).tolist()
    return losses


def _batches(task: Task) -> Any:
    shuffle = torch.Generator().manual_seed(0)
    x, y = task.train
    for epoch in range(task.epochs):
        chunks = torch.randperm(len(x), generator=shuffle).split(BATCH)
        for place, chunk in enumerate(chunks):
            yield x[chunk], y[chunk], epoch + place / len(chunks), len(chunks)


def timed(of: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a function returns, and the CPU seconds that it took."""
    began = time.process_time()
    return of(), time.process_time() - began


def row(wide: Sequence[float], narrow: Sequence[float], tolerance: float, **told: Any) -> dict[str, Any]:
    """Compare scores: rho, regret of the best 1 and 4, and the place of the wide model's best in the ranking."""
    found = compare_rankings(narrow, wide, top_k=4, tolerance=tolerance)
    best = int(np.nanargmin(wide))
    scores = np.nan_to_num(narrow, nan=np.inf)
    place = 1 + int((scores < scores[best]).sum())
    result = {**told, "rho": found.rho, "regret": [found.regret[k] for k in (1, 4)], "place": place}
    print(json.dumps(result), flush=True)
    return {**result, "scores": list(narrow)}


def full_size(task: Task, configs: Sequence[Config]) -> tuple[list[float], float, float]:
    """Train all configurations at full size: losses, CPU seconds, and the best one's spread between seeds."""
    wide, seconds = timed(lambda: [train_wide(task, config, i) for i, config in enumerate(configs)])
    best = configs[int(np.nanargmin(wide))]
    spread = statistics.stdev(train_wide(task, best, 1000 + seed) for seed in range(3))
    print(f"{task.name}: full size {seconds:.0f} s, best {min(wide):.4f}, spread {spread:.4f}", flush=True)
    return wide, seconds, spread


def of_blocks(task: Task, build: Build, blocks: int) -> tuple[Task, Build]:
    """Return the same task with a model of so many blocks."""

    def deep(width_ratio: float, depth_ratio: float, factor: float) -> nn.Module:
        return build(width_ratio, depth_ratio * blocks / BLOCKS, factor)

    name = f"{task.name}, {blocks} blocks"
    return dataclasses.replace(task, name=name, model_fn=lambda config, ratio: deep(ratio, 1.0, 1.0)), deep


def study(task: Task, build: Build, kind: str, count: int, seed: int) -> dict[str, Any]:
    """Compare surrogates of all sizes with the full-size model, over one set of configurations."""
    configs = sample(kind, count, seed)
    wide, seconds, spread = full_size(task, configs)
    rows = []
    sizes = [(size, 1 / size[1]) for size in SIZES]
    for size, factor in [*sizes, *((size, 1.0) for size in SIZES if size[1] < 1)]:
        narrow, took = timed(functools.partial(train_narrow, task, build, configs, size, factor))
        told = {"width": size[0], "depth": size[1], "factor": factor, "seconds": took, "cost": took / seconds}
        rows.append(row(wide, narrow, spread, **told))
    return {"wide_scores": wide, "seconds": seconds, "spread": spread, "rows": rows, "configs": configs}


def decay_study(task: Task, build: Build, count: int, seed: int) -> dict[str, Any]:
    """Compare rules for the weight decay of surrogates, on a quarter of the data for four times the epochs.

    Models then overfit, so that the best decay is above 0. A row tells how many octaves higher the weight decays of the
    surrogates' best six are than those of the full-size model's.
    """
    few = len(task.train[0]) // 4
    task = dataclasses.replace(task, train=(task.train[0][:few], task.train[1][:few]), epochs=4 * task.epochs)
    configs = sample_decays(count, seed)
    wide, seconds, spread = full_size(task, configs)
    octaves = np.log2([config["weight_decay"] for config in configs])

    def compared(scores: Sequence[float], width: float, rule: str) -> dict[str, Any]:
        higher = float(octaves[np.argsort(scores)[:6]].mean() - octaves[np.argsort(wide)[:6]].mean())
        return row(wide, scores, spread, width=width, rule=rule, higher=higher)

    rows = [
        compared(train_narrow(task, build, configs, (width, 1.0), decay=rule), width, rule)
        for width in (1 / 4, 1 / 8)
        for rule in ("product", *DECAYS)
    ]
    rows.append(compared([train_wide(task, config, 500 + i) for i, config in enumerate(configs)], 1.0, "other seeds"))
    return {"wide_scores": wide, "seconds": seconds, "spread": spread, "rows": rows, "configs": configs}


def embedding_rates(task: Task) -> list[dict[str, Any]]:
    """Return the best full-size loss over learning rates for each multiplier of the embedding's."""
    rows = []
    for multiplier in EMBEDDING:
        rates = [2.0**power for power in (-10, -8.5, -7, -5.5)]
        losses = [
            train_wide(task, {"lr": lr, "lr.embedding": multiplier * lr, "schedule": "linear"}, 7) for lr in rates
        ]
        rows.append({"multiplier": multiplier, "rates": rates, "losses": losses})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Run one study of one task, write `transfer_parts/<task>-<optimizer or decay>-<seed>.json`, render the page."""
    parser = options(__doc__, data=True)
    parser.add_argument("task", choices=("digits", "shakespeare", "cifar10"))
    parser.add_argument(
        "--optimizer", choices=("adamw", "muon"), default="adamw", help="cifar10 has no matrix for muon"
    )
    parser.add_argument("--configs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0, help="of the configurations; 0 also tries the embedding's rate")
    parser.add_argument("--decay", action="store_true", help="compare rules for the weight decay of surrogates")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of the full-size model")
    arguments = parser.parse_args()
    task, build = load(arguments.task, arguments.data)
    if arguments.blocks != BLOCKS:
        task, build = of_blocks(task, build, arguments.blocks)
    kind, count, seed = "decay" if arguments.decay else arguments.optimizer, arguments.configs, arguments.seed
    named = {"task": task.name, "optimizer": kind, "seed": seed, "environment": study_environment()}
    found = decay_study(task, build, count, seed) if arguments.decay else study(task, build, kind, count, seed)
    result = named | found
    path = arguments.out / "transfer_parts" / f"{task.name.replace(', ', '-').replace(' ', '-')}-{kind}-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    if kind == "adamw" and seed == 0 and arguments.blocks == BLOCKS:
        result["embedding"] = embedding_rates(task)
        path.write_text(json.dumps(result, indent=1) + "\n")
    write_page(arguments.out)


if __name__ == "__main__":
    main()
