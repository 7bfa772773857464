"""The training that Ray's workers run in population based training: plain torch, without `hydro_rasda`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.tasks.task import Task, objective
from benchmarks.vs_asha.training import Seeds, scores


def ray_member(config: Mapping[str, Any], task: Task, arrays: Mapping[str, Any], seeds: Seeds) -> None:
    """Train one member by plain torch, from its checkpoint, and report after every epoch."""
    from ray.tune import Checkpoint, get_checkpoint, report

    train, held = (tuple(torch.tensor(a) for a in arrays[part]) for part in ("train", "held"))
    task = replace(task, train=train, held=held)
    torch.manual_seed(seeds.weights)
    model, start = task.model_fn(dict(config), 1.0), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    if (checkpoint := get_checkpoint()) is not None:
        with checkpoint.as_directory() as path:
            state = torch.load(Path(path, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        optimizer.param_groups[0].update(lr=config["lr"], momentum=config["momentum"])
        start = state["epoch"]
    measure = objective(task.kind)
    for epoch in range(start, task.max_t):
        model.train()
        order = torch.randperm(len(task.train[0]), generator=torch.Generator().manual_seed(seeds.shuffles[epoch]))
        for chunk in order.split(config["batch_size"]):
            optimizer.zero_grad(set_to_none=True)
            measure(model, tuple(part[chunk] for part in task.train))["loss"].backward()
            optimizer.step()
        told = scores(task, model, config["batch_size"])
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, Path(folder, "state.pt"))
            report(told, checkpoint=Checkpoint.from_directory(folder))
