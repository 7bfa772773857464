"""Training by plain torch, as a user of Ray's ASHA would write it.

It imports nothing of `hydro_rasda`, so that Ray's workers need not import it, either. For the same seeds, it gives the
numbers of the race with `RaceConfig(ema=0)` to the last digit, because initial weights, order of examples, and updates
are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.tasks.task import Batch, Config, Task, objective
from fusion import lr_factor
from fusion.optim import optimizer

EVAL_BATCH_FACTOR = 4


@dataclass(frozen=True)
class Seeds:
    """The random numbers of one training."""

    weights: int
    shuffles: Sequence[int]


def build(task: Task, config: Config, seeds: Seeds) -> nn.Module:
    """Build the full-size model with its initial weights, on the task's device."""
    torch.manual_seed(seeds.weights)
    return task.model_fn(config, 1.0).to(task.device)


def train(task: Task, config: Config, seeds: Seeds, model: nn.Module) -> Iterator[dict[str, float]]:
    """Train until the loss is not finite or `max_t` epochs are done. Yield `scores` after each epoch.

    The task's data are on its device. Scores wait for the device, so the times between them measure finished work.
    """
    measure = objective(task.kind)
    update = optimizer(model, config)
    rates = [group["lr"] for group in update.param_groups]
    for epoch, shuffle in enumerate(seeds.shuffles):
        model.train()
        order = torch.randperm(len(task.train[0]), generator=torch.Generator().manual_seed(shuffle))
        chunks = order.to(task.device).split(config["batch_size"])
        total = torch.zeros((), device=task.device)
        for place, chunk in enumerate(chunks):
            factor = lr_factor(config, epoch + place / len(chunks), task.max_t, len(chunks))
            for group, rate in zip(update.param_groups, rates):
                group["lr"] = rate * factor
            loss = measure(model, tuple(part[chunk] for part in task.train))["loss"]
            update.zero_grad(set_to_none=True)
            loss.backward()
            update.step()
            total += loss.detach()
        yield scores(task, model, config["batch_size"])
        if not torch.isfinite(total):
            return


def scores(task: Task, model: nn.Module, batch_size: int) -> dict[str, float]:
    """Return `score` and `test` of a model, averaged over the validation and the test examples."""
    measure, totals = objective(task.kind), torch.zeros(2, dtype=torch.float64, device=task.device)
    model.eval()
    with torch.no_grad():
        for batch in _in_order(task.held, EVAL_BATCH_FACTOR * batch_size):
            measured = measure(model, batch)
            totals += torch.stack([measured["score"], measured["test"]]).double() * len(batch[0])
    score, test = (totals / len(task.held[0])).tolist()
    return {"score": score, "test": test}


def _in_order(tensors: Batch, size: int) -> Iterator[tuple[Tensor, ...]]:
    return (tuple(part[i : i + size] for part in tensors) for i in range(0, len(tensors[0]), size))
