"""Training functions that ranks run, and what a rank is told."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydro_rasda.processes.temporary_folders import owner
from hydro_rasda.training.worker import Worker


def job(**changes: Any) -> dict[str, Any]:
    """What `elastic` tells a rank: here, the only one of a trial that begins, without a scheduler."""
    told = {"config": {}, "trial": "t", "rank": 0, "world_size": 1, "workers": 1, "gpus": 0, "threads": 1}
    saving = {"checkpoint": None, "milestones": (), "checkpoint_every": None, "time_attr": "training_iteration"}
    return {**told, **saving, "ray_job": "a job", "owner": owner(os.getpid()), **changes}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Two noisy classes; 4096 wide, so that one copy of it is 32 MB."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(2048) % 2
    return torch.randn(2048, 4096, generator=generator) + 0.05 * y[:, None], y


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4096, 2)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def linear(worker: Worker) -> None:
    """A fixed global batch, so that the curve must not depend on the workers; faults once where told to."""
    x, y = worker.data
    model, optimizer = build()
    if worker.checkpoint is not None:
        model.load_state_dict(worker.checkpoint["model"])
        optimizer.load_state_dict(worker.checkpoint["optimizer"])
    trained = worker.prepare(model)
    while worker.iteration < 4:
        if _fault(worker):
            return
        for batch, weight in worker.batches(len(x), 130, fixed_global=True):
            loss = nn.functional.cross_entropy(trained(x[batch]), y[batch]) * weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            val_loss = nn.functional.cross_entropy(model(x), y).item()
        worker.report(
            {"loss": 0.0, "val_loss": val_loss, "private_mb": _private_mb(x), "pid": os.getpid()},
            lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        )


MANY = 1000


def apart(worker: Worker) -> None:
    """Nothing but many short iterations, in which rank 0 does not wait for rank 1: that raises in the first."""
    while worker.iteration < MANY:
        if worker.rank == 1:
            raise ArithmeticError("the user's own mistake")
        time.sleep(0.05)
        worker.report({"loss": 0.0}, {})


def in_tens(worker: Worker) -> None:
    """Nothing but iterations, counted in tens."""
    while worker.iteration < 100:
        worker.report({"loss": 0.0, "ep": {"n": 10 * (worker.iteration + 1)}}, {})


def counting(worker: Worker) -> None:
    """Nothing but iterations; faults once where told to."""
    while worker.iteration < 4:
        _fault(worker)
        worker.report({"loss": 0.0}, {})


def _fault(worker: Worker) -> bool:
    """Whether the rank is to return early, where it comes back at all."""
    fault = worker.config.get("fault")
    marker = Path(worker.config["folder"], f"{worker.trial}-faulted")
    if fault is None or worker.rank != min(1, worker.world_size - 1) or worker.iteration != 1 or marker.exists():
        return False
    marker.touch()
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hangs":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ArithmeticError("the user's own mistake")
    return bool(fault == "returns")


def _private_mb(data: torch.Tensor) -> float:
    """Megabytes of the memory region that holds `data` of which this process has a copy of its own."""
    here = False
    private = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(address, 16) for address in words[0].split("-"))
            here = start <= data.data_ptr() < end
        elif here and words[0] in ("Private_Clean:", "Private_Dirty:"):
            private += int(words[1])
    return private / 1024
