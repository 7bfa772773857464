"""A sweep in the bubbles of a pipeline: a transformer in 2 stages trains on 2 processes, and a sweep where it waits."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import hydro_rasda
import hydro_rasda.bubbles

WIDTH, TOKENS, LENGTH, MICRO_BATCHES = 128, 64, 64, 2


class Stage(nn.Module):
    """Half of a language model: with the embedding, or with the head."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH) if rank == 0 else nn.Identity()
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(WIDTH, TOKENS) if rank == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.embed(x)))
        return y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a micro-batch."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def host(rank: int, port: int, source: Path, over: Event) -> None:
    """Train one rank of the pipeline. Its training and the sweep do not depend on each other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = Stage(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = Schedule1F1B(PipelineStage(model, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn)
    x = torch.randint(TOKENS, (8 * MICRO_BATCHES, LENGTH))
    with hydro_rasda.bubbles.bubbles(schedule, source) as guest:  # the only line that a host needs
        enough = torch.tensor(False)
        while not enough:
            losses: list[Tensor] = []
            schedule.step(*[x] if rank == 0 else [], target=x, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            enough = torch.tensor(over.is_set())
            dist.broadcast(enough, 0)
    share = guest.open / max(guest.waited, 1e-9)
    told = f"rank {rank}: {guest.steps} steps; {guest.waited:.0f} s of bubbles, {share:.0%} of them open to guests"
    # Write the text and the newline in one call. `print` writes them in two, and the other rank could write in between.
    sys.stdout.write(f"{told}\n")
    dist.destroy_process_group()


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """Build the model that is tuned, a classifier of digits."""
    width = round(256 * width_ratio)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def sweep(source: Path, runs: Path) -> hydro_rasda.TuneResult:
    """Call `tune` as usual, except for its backend."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    space = {
        "lr": hydro_rasda.loguniform(1e-3, 1.0),
        "momentum": hydro_rasda.uniform(0.5, 0.95),
        "optimizer": "sgd",
        "batch_size": 64,
    }
    return hydro_rasda.tune(
        model_fn,
        space,
        train_data=(x[:1200], y[:1200]),
        val_data=(x[1200:1500], y[1200:1500]),
        num_samples=16,
        max_t=9,
        race=hydro_rasda.RaceConfig(top_k=2),
        sweep=hydro_rasda.SweepConfig(fusion=8),
        full_trainings=1,
        storage_path=runs,
        name="bubbles",
        backend=hydro_rasda.bubbles.BubbleBackend(source),
    )


def main() -> None:
    """Start the host, and the sweep beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the sweep is kept")
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    over = spawn.Event()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=host, args=(rank, port, Path(folder), over)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        try:
            # Usually, the tuner has a machine of its own. Here, the lowest priority keeps it out of the host's way.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            sweep(Path(folder), arguments.runs)
        finally:
            over.set()
            for rank in ranks:
                rank.join()


if __name__ == "__main__":
    main()
