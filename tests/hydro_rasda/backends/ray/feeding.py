"""A full-size training function that takes milliseconds, and a run for it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydro_rasda.config import TuneConfig
from hydro_rasda.data import make_batches
from hydro_rasda.objective import supervised
from hydro_rasda.problem import Problem
from hydro_rasda.run.state import Run
from hydro_rasda.run.store import Store
from hydro_rasda.training.worker import Worker
from hydro_rasda.trial import Trial


def train(worker: Worker) -> None:
    """Linear regression; `config` says how slow it is and at which epoch it fails."""
    config, problem = worker.config["config"], worker.data
    model = problem.target(Trial(worker.config["trial"], config))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    if worker.checkpoint is not None:
        model.load_state_dict(worker.checkpoint["model"])
        optimizer.load_state_dict(worker.checkpoint["optimizer"])
    trained = worker.prepare(model)
    while worker.iteration < problem.settings.max_t:
        if worker.iteration + 1 == config.get("fails_at"):
            raise ArithmeticError("the user's own mistake")
        time.sleep(config.get("seconds", 0.0))
        for batch in problem.train_data.epoch(32, worker.iteration):
            loss = nn.functional.cross_entropy(trained(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            x, y = next(problem.val_data.in_order(160))
            val_loss = nn.functional.cross_entropy(model(x), y).item()
        worker.report(
            {"epoch": worker.iteration + 1, "train_loss": loss.item(), "val_loss": val_loss},
            lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            final=worker.iteration + 1 == problem.settings.max_t,
        )


def noise() -> Problem:
    """Two noisy classes."""
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    y = torch.arange(320) % 2
    x = torch.randn(320, 64, generator=generator) + 0.1 * y[:, None]
    train_data, val_data = make_batches((x, y), "train_data", cpu, 0), make_batches((x, y), "val_data", cpu, 0)
    return Problem(linear, supervised(), train_data, val_data, TuneConfig(surrogate=0.5, max_t=8), cpu)


def of_linear(problem: Problem) -> Problem:
    """The same data, and linear models of it."""
    return replace(problem, model_fn=linear)


def linear(config: dict[str, Any]) -> nn.Module:
    width = 16 if config.get("wide") else 8
    return nn.Sequential(nn.Linear(64, width), nn.Linear(width, 10))


def open_run(path: Path, problem: Problem, configs: list[dict[str, Any]], **settings: Any) -> Run:
    """A run whose sweep is over."""
    store = Store.open(path, {}, "auto")
    trials = {number: Trial(number, config) for number, config in enumerate(configs)}
    return Run(problem.with_settings(**settings), store, trials=trials)
