"""A Ray Tune trainable made of a training function, which uses as many workers as its trial has.

This file runs in the trials' actors, and is pickled by value. If an actor imported the package, it would import torch,
which takes longer than the rest of a resize. Training happens in ranks that each node's fork server starts
(`hydro_rasda.backends.ray.fork_server`). The trial's own actor controls rank 0, and a rank actor controls each other
rank. A rank actor holds one bundle of the trial's placement group, so that Ray counts each worker's resources as used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import cloudpickle, tune
from ray.tune.result import AUTO_RESULT_KEYS, TRAINING_ITERATION
from ray.tune.schedulers import TrialScheduler

from hydro_rasda.backends.ray.fork_client import fork_rank, receive
from hydro_rasda.backends.ray.rank_actors import Ending, RankActors, blame
from hydro_rasda.backends.ray.scheduler import RASDAScheduler
from hydro_rasda.common.argument_checks import check_choice, check_function, check_int, is_number, require
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.processes.temporary_folders import owner
from hydro_rasda.run.pickling import pickle_config_modules

if TYPE_CHECKING:
    from hydro_rasda.training.worker import Worker

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules[HangDetector.__module__])

_LOOK_S = 0.5
_LONGEST = timedelta(days=365)
_FINAL_MESSAGE_S = 3.0
# Seconds that Ray waits for a trial to end before it gives the trial's actor to another trial. If the trial takes
# longer, the other trial fails. Ray's default of 2 s is too short on a busy node.
_LEAVE_S = 60


def elastic(
    train: Callable[[Worker], None],
    scheduler: TrialScheduler | None = None,
    *,
    data: Any = None,
    checkpoint_every: int | None = None,
    timeout_s: float = 1800.0,
    backend: str | None = None,
) -> Callable[[dict[str, Any]], None]:
    """Make a Ray Tune trainable from a function that trains on one of several ranks.

    Args:
        train: `train(worker)`, called on every rank with a `Worker`. It builds its model from `worker.config`, resumes
            from `worker.checkpoint`, and ends each iteration with `worker.report(metrics, state)`.
        scheduler: The scheduler of the same tuner. A `RASDAScheduler` sets the number of workers, and its milestones
            determine when to save. Its `time_attr` must be a number that `train` reports, or "training_iteration". With
            any other scheduler, or None, a trial keeps one worker for each bundle of its own resources
            (`tune.with_resources(elastic(...), tune.PlacementGroupFactory([{"CPU": 1}] * 2))`; one by default). It then
            saves by `checkpoint_every`, and when it reports `final=True`.
        data: Any object that can be pickled; each rank gets it as `worker.data`. It is pickled once, here. Each node
            holds it once, not once per trial.
        checkpoint_every: Also save every `checkpoint_every` iterations, to lose less in a crash. None saves only when a
            trial may pause and at its end. Schedulers of Ray that pause or copy trials (HyperBand, PBT) need 1, or
            their own interval.
        timeout_s: A rank counts as dead if the others wait for it longer than this. A silent rank also counts as dead,
            after this time or 100 times the longest iteration since the trial's last start, whichever is longer.
        backend: "gloo" or "nccl". None: NCCL if each worker has its own GPU, otherwise gloo.

    Returns:
        A trainable for `tune.Tuner`. If a rank dies or hangs, its trial fails. It resumes from its last checkpoint with
        the same size, as often as `tune.FailureConfig(max_failures=...)` allows.

    Raises:
        ValueError: if `checkpoint_every` is below 1, `timeout_s` is not positive, or `backend` is unknown.
    """
    check_function("train", train, 1, rule="a function of a Worker")
    known = scheduler is None or isinstance(scheduler, TrialScheduler)
    require(known, "scheduler", scheduler, "one of Ray Tune's, such as a RASDAScheduler, or None")
    check_int("checkpoint_every", checkpoint_every, at_least=1, optional=True)
    _check_timeout(timeout_s)
    if backend is not None:
        check_choice("backend", backend, ("gloo", "nccl"))
    rule = scheduler.rule if isinstance(scheduler, RASDAScheduler) else None
    options = {
        "milestones": rule.milestones if rule else (),
        "time_attr": _time_attr(scheduler),
        "workers": rule.workers if rule else None,
        "checkpoint_every": checkpoint_every,
        "timeout_s": timeout_s,
        "backend": backend,
    }
    return _trainable(train, data, options)


def _trainable(train: Callable[[Worker], None], data: Any, options: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    pickle_config_modules()
    pickled = cloudpickle.dumps((train, data))
    payload = np.frombuffer(pickled, dtype=np.uint8)  # an array, because Ray's actors read arrays without a copy
    # A fork server recognizes a function that it has loaded by this digest. The digest is computed only once, here, not
    # at each resize, when a trial starts anew.
    digest = hashlib.sha256(pickled).hexdigest()

    def trainable(config: dict[str, Any], payload: Any = None) -> None:
        _run_trial(config, digest, payload, options)

    trainable.__name__ = getattr(train, "__name__", type(train).__name__)
    return tune.with_parameters(trainable, payload=payload)  # type: ignore[no-any-return]


def _check_timeout(timeout_s: float) -> None:
    most = _LONGEST.total_seconds()
    short = is_number(timeout_s) and 0 < timeout_s <= most
    require(short, "timeout_s", timeout_s, f"a number of seconds > 0, at most {most:.0f} (a year)")


def _time_attr(scheduler: TrialScheduler | None) -> str:
    """Return the name of the reported number in which milestones are counted."""
    name = scheduler.time_attr if isinstance(scheduler, RASDAScheduler) else TRAINING_ITERATION
    rule = f"{TRAINING_ITERATION!r}, or the name of a number that `train` reports: a rank does not know what Ray adds"
    require(name == TRAINING_ITERATION or name not in AUTO_RESULT_KEYS, "time_attr", name, rule)
    return name


def _run_trial(config: dict[str, Any], digest: str, payload: Any, options: dict[str, Any]) -> None:
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", str(_LEAVE_S))
    context = tune.get_context()
    bundles = context.get_trial_resources().bundles
    with _checkpoint_folder() as folder, contextlib.ExitStack() as stack:
        job = {
            **options,
            "workers": options["workers"] or len(bundles),
            "config": config,
            "trial": context.get_trial_id(),
            "ray_job": ray.get_runtime_context().get_job_id(),
            "rank": 0,
            "world_size": len(bundles),
            "store": (ray.util.get_node_ip_address(), 0),
            "checkpoint": folder,
            "owner": owner(os.getpid()),
            "cwd": os.getcwd(),
            "gpus": bundles[0].get("GPU", 0),
            "threads": max(1, int(bundles[0].get("CPU", 1))),
        }
        actors = RankActors(bundles, stack)
        head = stack.enter_context(fork_rank(digest, payload, job))
        _follow(head, actors, (digest, payload, job))


def _follow(head: Connection, actors: RankActors, order: tuple[str, Any, dict[str, Any]]) -> None:
    """Let the other ranks start with `order`; pass rank 0's reports on to Tune until every rank is done."""
    job, pid = order[2], None
    iterations, heard = HangDetector("no iteration was over", job["timeout_s"]), time.monotonic()
    look = heard
    while True:
        if time.monotonic() >= look:  # even if rank 0 reports, because it may not wait for the other ranks
            if actors.failed():
                raise RuntimeError(_diagnosis(job, actors, _final_message(head, pid)))
            look = time.monotonic() + _LOOK_S
        if not wait([head], timeout=_LOOK_S):
            if time.monotonic() - heard > iterations.patience:
                raise RuntimeError(_diagnosis(job, actors, ("silent", iterations.told, "", pid)))
            continue
        kind, content = receive(head)
        if kind == "hello":
            pid, heard = content, time.monotonic()
        elif kind == "store":
            actors.start(content, *order)
        elif kind == "report":
            iterations.took(time.monotonic() - heard)
            _report(*content)
            head.send(None)
            heard = time.monotonic()
        elif kind == "done":
            break
        else:
            raise RuntimeError(_diagnosis(job, actors, (kind, content, "", pid)))
    if any(kind != "done" for kind, *_ in actors.endings(job["timeout_s"]).values()):
        raise RuntimeError(_diagnosis(job, actors, ("done", "", "", pid)))


def _report(metrics: dict[str, Any], folder: str | None) -> None:
    if folder is None:
        tune.report(metrics)
        return
    try:
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _final_message(head: Connection, pid: int | None) -> Ending:
    if not wait([head], timeout=_FINAL_MESSAGE_S):
        return "silent", "", "", pid
    kind, content = receive(head)
    return kind, content if kind == "error" else "", "", pid


def _diagnosis(job: dict[str, Any], actors: RankActors, first: Ending) -> str:
    """Describe a failure by the rank that caused it, not by ranks that waited for it; `first` is rank 0's ending."""
    endings = {0: first, **actors.endings(_FINAL_MESSAGE_S)}
    rank = blame(endings)
    kind, message, host, pid = endings[rank]
    what = {
        "died": "died",
        "silent": f"did not answer for {job['timeout_s']} s",
        "done": "returned from its training function while others waited for it: all ranks must report as often",
    }.get(kind, "raised an error")
    process = f" (process {pid})" if pid else ""
    where = host or (actors.host(rank) if rank else socket.gethostname())
    return f"trial {job['trial']}: rank {rank} of {job['world_size']} on {where}{process} {what}\n{message}"


@contextlib.contextmanager
def _checkpoint_folder() -> Iterator[str | None]:
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield folder
