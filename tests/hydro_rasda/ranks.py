"""Several real gloo ranks on this machine, without Ray."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = [__name__, "hydro_rasda.training.full_size", "torch._dynamo", "tests.hydro_rasda.conftest"]
"""One process imports these, and all ranks are forked of it."""


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, world, *arguments)` returns on each rank, none of which may warn of anything."""
    # That process starts at the first call, and so it also imports the first test module that has ranks.
    _CONTEXT.set_forkserver_preload([*_IMPORTED, function.__module__])
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank, args=(theirs, folder, rank, world, function, arguments))
            process.start()
            theirs.close()
            started.append((process, ours))
        # All are heard before any is judged: a rank that waits in vain for another one says less than that one.
        answers = [ours.recv_bytes() for _, ours in started]
        for process, ours in started:
            process.join()
            ours.close()
        # Torch's C++ does not warn through Python.
        for said in Path(folder).glob("stderr-*"):
            assert "Warning" not in said.read_text()
    loaded = [torch.load(io.BytesIO(answer), weights_only=False) for answer in answers]
    assert not any(error for _, error in loaded), "\n".join(error for _, error in loaded)
    return [result for result, _ in loaded]


def _rank(
    answer: Connection, folder: str, rank: int, world: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    warnings.simplefilter("error")
    with open(Path(folder, f"stderr-{rank}"), "wb") as said:
        os.dup2(said.fileno(), 2)
    torch.set_num_threads(1)
    result, error = None, ""
    try:
        store = dist.FileStore(  # type: ignore[attr-defined]  # missing from torch's own export list
            str(Path(folder, "store")), world
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
        result = function(rank, world, *arguments)
    except BaseException:
        error = traceback.format_exc()
    saved = io.BytesIO()
    torch.save((result, error), saved)
    answer.send_bytes(saved.getvalue())
    answer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
