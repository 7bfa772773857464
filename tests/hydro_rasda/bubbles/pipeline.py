"""A host: one rank of a pipeline over gloo. Run as a program, in each of its ranks.

What it is told are JSON values: the schedule, micro-batches, steps, a folder to write to, and the folder of guests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

from hydro_rasda.bubbles import bubbles

WIDTH, EXAMPLES = 64, 4


class Block(nn.Module):
    """Takes its time, so that its neighbour waits; draws random numbers, which must be the host's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        y: Tensor = self.layers(x)
        return y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def schedule_of(name: str, micro_batches: int, rank: int) -> tuple[Any, list[nn.Module]]:
    """A schedule of torch's over two ranks, and this rank's stages."""
    kind = pipelining.schedules.get_schedule_class(name)
    single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    indices = [rank] if single else [rank, rank + 2]
    modules: list[nn.Module] = [Block() for _ in indices]
    count = 2 * len(indices)
    stages = [pipelining.PipelineStage(m, i, count, torch.device("cpu")) for m, i in zip(modules, indices)]
    return kind(stages[0] if single else stages, micro_batches, loss_fn=loss_fn), modules


def is_enough(folder: Path, rank: int) -> bool:
    """Whether the test needs no more steps, which all ranks learn at the same one."""
    enough = torch.tensor((folder / "enough").exists())
    dist.broadcast(enough, 0)
    return bool(enough)


def main(name: str, micro_batches: int, steps: int, folder: str, source: str | None) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    schedule, modules = schedule_of(name, micro_batches, rank)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    x, y = torch.randn(2, micro_batches * EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    told: dict[str, Any] = {"losses": []}
    with bubbles(schedule, source) if source else contextlib.nullcontext() as guest:
        for _ in range(steps):
            losses: list[Tensor] = []
            is_last = rank == 1
            schedule.step(*([] if rank else [x]), **({"target": y, "losses": losses} if is_last else {}))
            optimizer.step()
            optimizer.zero_grad()
            told["losses"] += [[loss.item() for loss in losses]]
            if is_enough(Path(folder), rank):
                break
        if guest is not None:
            told |= {"waited": guest.waited, "open": guest.open, "used": guest.used}
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)
    told["weights"] = hashlib.sha256(weights).hexdigest()
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    vars(os)["SCHED_IDLE"] = os.SCHED_OTHER  # guests of the idle class would hardly run where other tests compute
    main(*json.loads(sys.argv[1]))
