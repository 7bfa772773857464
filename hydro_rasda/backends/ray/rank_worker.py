"""The process of a rank of an elastic trial: it joins the other ranks, trains, and reports to the trial's actor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from hydro_rasda.backends.ray.report_journal import plain_number
from hydro_rasda.processes.temporary_folders import make_folder
from hydro_rasda.records.records import flat
from hydro_rasda.training.distributed import await_joined, await_ranks, listening_store, reached_store
from hydro_rasda.training.worker import Saving, State, Worker

CHECKPOINT_FILE = "worker.pt"


class RankWorker(Worker):
    """A worker that reports through a connection. It saves checkpoints as folders, as Ray Tune requires."""

    def __init__(self, job: Mapping[str, Any], data: Any, connection: Connection) -> None:
        device = torch.device("cuda", 0) if job["gpus"] else torch.device("cpu")
        saved = _load(job["checkpoint"]) or {}
        # Without a RASDAScheduler, `job["workers"]` is the number of workers that the trial has now. The number that it
        # had at first is in its checkpoint.
        self._workers = saved.get("workers", job["workers"])
        super().__init__({**job, "workers": self._workers}, data, device, saved or None)
        self._job, self._connection = job, connection
        self._reported: dict[str, float] = dict(saved.get("reported", {}))
        """Maps each metric to the value of `time_attr` at its last report."""
        self._due = False

    def report(self, metrics: Mapping[str, Any], state: Saving = None, *, final: bool = False) -> None:
        # All ranks must decide alike. So decide by which metrics there are and by `time_attr`: other values may differ.
        self._due = isinstance(metrics, Mapping) and self._saves_at(metrics)
        super().report(metrics, state, final=final)

    def _saves_at(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether this report needs a checkpoint: the trial may pause or end here, or saves for safety.

        A rank does not know which metric decides. So the first report of each metric at or after a milestone is saved.
        """
        iteration, every, at = self.iteration + 1, self._job["checkpoint_every"], self._job["milestones"]
        # Nested names are as in Ray's schedulers: "val/loss". A metric that is None decides nothing.
        named = {name: value for name, value in flat(metrics).items() if value is not None}
        name = self._job["time_attr"]
        # Tune adds "training_iteration" later, so count it here.
        t = plain_number(named.get(name, iteration if name == "training_iteration" else None))
        safety = every is not None and iteration % every == 0
        if not at or t is None:
            return safety
        names = {*named, name}
        since = min(self._reported.get(each, 0) for each in names)
        self._reported.update(dict.fromkeys(names, t))
        return safety or t >= at[-1] or any(since < milestone <= t for milestone in at)

    def _deliver(self, results: dict[str, Any], saving: Saving, final: bool) -> None:
        due = saving is not None and (final or self._due)
        folder = self._save(saving() if callable(saving) else saving) if due else None
        self._connection.send(("report", (results, folder)))
        self._connection.recv()

    def _attend(self, saving: Saving, final: bool) -> None:
        if callable(saving) and (final or self._due):
            saving()

    def _save(self, state: State | None) -> str:
        folder = make_folder(self._job["owner"])
        path = os.path.join(folder, CHECKPOINT_FILE)
        try:
            torch.save({**self.saved(state), "reported": self._reported, "workers": self._workers}, path)
        except (OSError, RuntimeError) as error:  # torch's message does not mention the disk, so add its space
            free = shutil.disk_usage(folder).free // 2**20
            raise OSError(f"{path} could not be written, and its disk has {free} MiB left: {error}") from error
        return folder


def run_rank(payload: Any, job: Mapping[str, Any], connection: Connection) -> None:
    """Join the trial's process group, run the training function, and report that it is done."""
    train, data = payload
    torch.set_num_threads(job["threads"])
    connection.send(("hello", os.getpid()))
    if job["world_size"] > 1:
        rank, world_size = job["rank"], job["world_size"]
        host, port = job["store"]
        store = reached_store(host, port) if rank else listening_store(host)
        if rank == 0:
            connection.send(("store", (host, store.port)))
        await_ranks(store, rank, world_size)
        # Use gloo if a worker has a part of a GPU: NCCL refuses two ranks on one GPU.
        backend = job["backend"] or ("nccl" if job["gpus"] >= 1 else "gloo")
        timeout = timedelta(seconds=job["timeout_s"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        await_joined(store, rank, world_size)
    worker = RankWorker(job, data, connection)
    train(worker)
    if worker.iteration == 0:
        raise RuntimeError("the training function never called worker.report; tune.report tells nothing from a rank")
    connection.send(("done", None))


def _load(folder: str | None) -> dict[str, Any] | None:
    if folder is None:
        return None
    saved: dict[str, Any] = torch.load(os.path.join(folder, CHECKPOINT_FILE), weights_only=True, map_location="cpu")
    return saved
