"""What is trained, and how: trials whose batch grows at RASDA's milestones."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.result_files import DEFAULT_DATA, Row
from benchmarks.tasks.load import load_task
from benchmarks.tasks.task import Batch, objective
from hydro_rasda import RaceConfig, SweepConfig
from hydro_rasda.backends.ray import RescaledLR
from hydro_rasda.config import TuneConfig
from hydro_rasda.contracts import Span
from hydro_rasda.data import ALONE, Shard, make_batches
from hydro_rasda.problem import Problem
from hydro_rasda.training.full_size import full_size_learner
from hydro_rasda.training.loop import train_epochs
from hydro_rasda.trial import Trial

MILESTONES = (2, 4, 8)
EPOCHS = 16
RULES = ("linear", "sqrt", "none")
WARMUPS = (0, 1)
WORKERS = (2, 4, 8)
RATE_SEEDS = range(100, 103)
"""Other seeds than those of the table: the best learning rate is chosen on these."""

BATCH = {"digits": 16, "warm_up": 8, "recurrent": 8, "shakespeare": 16}
WIDTH = {"digits": 1.0, "warm_up": 0.5, "recurrent": 0.5, "shakespeare": 0.25}
KINDS = {(task, optimizer): 5 for task in ("digits", "warm_up", "recurrent") for optimizer in ("sgd", "adamw")}
KINDS["shakespeare", "adamw"] = 3
"""By task and optimizer, the seeds of the table; a transformer takes longest, and is not trained with SGD."""

SEEDS = range(max(KINDS.values()))
EXAMPLES = 600
"""As many of a task's training examples are used: trainings of about a second."""

RATES = {"sgd": [2.0**-k for k in range(1, 8)], "adamw": [2.0**-k for k in range(5, 12)]}
MOMENTUM = 0.9


@dataclass(frozen=True)
class Cell:
    """A training.

    Attributes:
        optimizer: "sgd" or "adamw".
        rule: The rule of the learning rate, see `RaceConfig.lr_rule`.
        warmup: Epochs over which it is, each time that the batch grows.
    """

    task: str
    optimizer: str
    lr: float
    workers: int = 1
    rule: str = "none"
    warmup: int = 0
    seed: int = 0

    @property
    def config(self) -> Row:
        """As `tune` knows it."""
        own = {"momentum": MOMENTUM} if self.optimizer == "sgd" else {}
        return {"optimizer": self.optimizer, "lr": self.lr, "batch_size": BATCH[self.task], "schedule": "cosine", **own}

    def segments(self) -> list[tuple[Span, int]]:
        """Epochs, and by how much the batch has grown there."""
        bounds = [0, *MILESTONES[: int(math.log2(self.workers))], EPOCHS]
        return [(Span(start, stop), 2**k) for k, (start, stop) in enumerate(pairwise(bounds))]


@cache
def problem(task: str, precise: bool) -> Problem:
    """A task's model, data and loss; in double precision for comparisons of rounding errors."""
    found = load_task(task, Path(DEFAULT_DATA))

    def ready(parts: Batch) -> Batch:
        return tuple(part.double() if precise and part.is_floating_point() else part for part in parts)

    def model_fn(config: Row) -> torch.nn.Module:
        model = found.model_fn(config, WIDTH[task])
        return model.double() if precise else model

    cpu = torch.device("cpu")
    return Problem(
        model_fn=model_fn,
        objective=objective(found.kind),
        train_data=make_batches(ready(tuple(part[:EXAMPLES] for part in found.train)), "train_data", cpu, 0),
        val_data=make_batches(ready(found.held[:2]), "val_data", cpu, 0),
        settings=TuneConfig(sweep=SweepConfig(surrogate=1), max_t=EPOCHS, race=RaceConfig(keep="last")),
        device=cpu,
    )


def segment(cell: Cell, span: Span, growth: int, state: Row | None, shard: Shard, precise: bool = False) -> Row:
    """Train a cell from one milestone to the next, on one rank or several.

    Returns:
        State to go on from, and each epoch's mean loss of training ("train") and validation examples ("val").
    """
    asked = problem(cell.task, precise).with_settings(seed=cell.seed)
    learner = full_size_learner(asked, Trial(0, cell.config), shard)
    if state is not None:
        learner.load(state["learner"])
    size = cell.config["batch_size"] * growth
    steps = asked.train_data.steps(size) or 0
    before = None if state is None else state["rescaled"]
    rescaled = RescaledLR(learner.optimizer, growth, cell.rule, cell.warmup * steps, before)
    losses = [] if state is None else list(state["losses"])
    for _, metrics in train_epochs(learner, asked, span, size, [0]):
        losses.append((metrics["train_loss"][0], metrics["val_loss"][0]))
    return {"learner": learner.state(), "rescaled": rescaled.state_dict(), "losses": losses}


def train(cell: Cell) -> Row:
    """A cell, trained in this process; its losses are inf where it diverged."""
    state: Row | None = None
    began = time.perf_counter()
    for span, growth in cell.segments():
        state = segment(cell, span, growth, state, ALONE)
        if len(state["losses"]) < span.stop:
            break  # not finite
    assert state is not None
    last = state["losses"][-1] if len(state["losses"]) == EPOCHS else (math.inf, math.inf)
    train_loss, val_loss = (value if math.isfinite(value) else math.inf for value in last)
    seconds = round(time.perf_counter() - began, 2)
    return {**asdict(cell), "train_loss": train_loss, "val_loss": val_loss, "seconds": seconds}


def searched(task: str, optimizer: str) -> list[Cell]:
    """The trainings from which the learning rate is chosen: the first batch throughout."""
    return [Cell(task, optimizer, lr, seed=seed) for lr in RATES[optimizer] for seed in RATE_SEEDS]


def best_rate(rows: Sequence[Row], task: str, optimizer: str) -> float:
    """Of these, the one with the least validation loss in the median of its seeds."""
    losses = defaultdict(list)
    for row in rows:
        if (row["task"], row["optimizer"]) == (task, optimizer) and row["seed"] in RATE_SEEDS:
            losses[row["lr"]].append(row["val_loss"])
    best: float = min(losses, key=lambda lr: median(losses[lr]))
    return best


def compared(task: str, optimizer: str, lr: float) -> list[Cell]:
    """The trainings of the table, seed by seed."""
    found = []
    for seed in range(KINDS[task, optimizer]):
        found.append(Cell(task, optimizer, lr, seed=seed))
        grown = [
            (k, rule, warmup) for k in WORKERS for rule in RULES for warmup in WARMUPS if (rule, warmup) != ("none", 1)
        ]
        found += [Cell(task, optimizer, lr, *of, seed) for of in grown]
    return found


def wanted(rows: list[Row]) -> Iterator[Cell]:
    """Trainings that are missing, as long as there are any."""
    done = {key(row) for row in rows}
    for kind in KINDS:
        yield from (cell for cell in searched(*kind) if key(asdict(cell)) not in done)
    for seed in SEEDS:
        for kind in KINDS:
            cells = compared(*kind, best_rate(rows, *kind))
            yield from (cell for cell in cells if cell.seed == seed and key(asdict(cell)) not in done)


def key(row: Row) -> tuple[Any, ...]:
    """By what one training differs from another."""
    return tuple(row[name] for name in ("task", "optimizer", "lr", "workers", "rule", "warmup", "seed"))
