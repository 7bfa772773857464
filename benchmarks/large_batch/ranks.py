"""The same on real ranks: that they learn what one process learns, and what measuring the noise scale takes."""

from __future__ import annotations

import io
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.large_batch.cells import BATCH, Cell, problem, segment
from benchmarks.result_files import Row
from hydro_rasda.contracts import Span
from hydro_rasda.data import ALONE, Shard
from hydro_rasda.training.full_size import full_size_learner
from hydro_rasda.training.gradient_noise import GradientNoise
from hydro_rasda.trial import Trial

PAIRS = 21


def check(folder: Path) -> Row:
    """A training of the table on real ranks, against one process with the same batches, in double precision.

    Returns:
        The training, and the largest relative difference of a loss, of any epoch.
    """
    cell = Cell("digits", "sgd", 2.0**-5, 4, "linear", 1)
    alone: Row | None = None
    ranks: Row | None = None
    for span, growth in cell.segments():
        alone = segment(cell, span, growth, alone, ALONE, precise=True)
        ranks = _on_ranks(growth, folder, _segment, cell, span, growth, _packed(ranks))
    assert alone is not None
    assert ranks is not None
    pairs = [pair for a, b in zip(alone["losses"], ranks["losses"], strict=True) for pair in zip(a, b, strict=True)]
    return {**asdict(cell), "difference": max(abs(a / b - 1) for a, b in pairs)}


def overhead(folder: Path) -> Row:
    """By task: seconds of a step on two ranks, and what measuring the noise scale adds to it; medians of pairs."""
    return {task: _on_ranks(2, folder, _overhead, task) for task in ("digits", "warm_up", "recurrent")}


def _overhead(shard: Shard, task: str) -> Row:
    asked = problem(task, precise=False)
    config = Cell(task, "sgd", 2.0**-5).config
    plain, measured = (full_size_learner(asked, Trial(0, config), shard) for _ in range(2))
    measured.noise = GradientNoise(measured.joint)
    shares = list(asked.train_data.shares(2 * BATCH[task], 0, shard))[:-1]
    alone, more = [], []
    for _ in range(PAIRS):
        seconds = []
        for learner in (plain, measured):
            dist.barrier()
            began = time.perf_counter()
            for share in shares:
                learner.step(share, 0.0, len(shares))
            seconds.append((time.perf_counter() - began) / len(shares))
        alone.append(seconds[0])
        more.append(seconds[1] - seconds[0])
    return {"step": median(alone), "more": median(more)}


def _on_ranks(world: int, folder: Path, work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work(shard, *arguments)` returns on rank 0 of as many processes."""
    store = folder / "large_batch.ranks"
    store.unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    started = [
        context.Process(target=_rank, args=(Shard(rank, world), store, theirs, work, arguments))
        for rank in range(world)
    ]
    for process in started:
        process.start()
    theirs.close()
    found = torch.load(io.BytesIO(ours.recv_bytes()), weights_only=True)
    for process in started:
        process.join()
    store.unlink(missing_ok=True)
    return found


def _rank(shard: Shard, store: Path, answer: Any, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store.resolve()}", rank=shard.rank, world_size=shard.world)
    found = work(shard, *arguments)
    if shard.rank == 0:
        answer.send_bytes(_packed(found))
    dist.destroy_process_group()


def _segment(shard: Shard, cell: Cell, span: Span, growth: int, state: bytes) -> Row:
    return segment(cell, span, growth, torch.load(io.BytesIO(state), weights_only=True), shard, precise=True)


def _packed(value: Any) -> bytes:
    saved = io.BytesIO()
    torch.save(value, saved)
    return saved.getvalue()
