"""A training function as a Ray Tune trainable that uses as many workers as its trial has.

This file runs in the trials' actors, and is pickled by value: an actor that imported the package would
import torch, which takes longer than all else that a resize does. Training happens in ranks forked of each
node's warm process (:mod:`hydro_rasda.backends.zygote`): rank 0 next to the trial's actor, each other one
next to a seat, an actor that holds one bundle of the trial's placement group, so that Ray's books are
right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import cloudpickle, tune
from ray.tune.schedulers import TrialScheduler

from hydro_rasda.backends.ray_scheduler import RASDAScheduler
from hydro_rasda.backends.seats import Ending, Seats, blame
from hydro_rasda.backends.warm import fork_rank, receive

if TYPE_CHECKING:
    from hydro_rasda.backends.worker import Worker

cloudpickle.register_pickle_by_value(sys.modules[__name__])

_LOOK_S = 0.5
_LAST_WORDS_S = 3.0
# What Ray waits for a trial to end before it gives the trial's actor to another, which otherwise fails; 2 s by default,
# which a busy node exceeds.
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
    """Makes a Ray Tune trainable of a function that trains on one of several ranks.

    Args:
        train: ``train(worker)``, called on every rank; see :class:`~hydro_rasda.backends.worker.Worker`. It
            builds its
            model from ``worker.config``, goes on from ``worker.checkpoint``, and ends each iteration with
            ``worker.report(metrics, state)``.
        scheduler: The scheduler of the same tuner. A :class:`RASDAScheduler`'s milestones say when to save,
            and it sets the number of workers. Under any other, or None, a trial keeps one worker for each
            bundle of its own resources (``tune.with_resources(elastic(...),
            tune.PlacementGroupFactory([{"CPU": 1}] * 2))``; one by default), and saves by
            ``checkpoint_every`` and where it reports ``final=True``.
        data: Anything picklable, handed to each rank as ``worker.data``. Held once on each node, not once
            per trial.
        checkpoint_every: Also save every so many iterations, for safety from crashes; None to save only
            where a trial may pause and at its end. Schedulers of Ray's that pause or copy trials (HyperBand,
            PBT) need 1, or the interval at which they do.
        timeout_s: A rank that the others wait for longer is taken for dead.
        backend: "gloo" or "nccl"; None for NCCL on GPUs and gloo elsewhere.

    Returns:
        A trainable for ``tune.Tuner``. A trial whose rank dies or hangs fails, and goes on from its last
        checkpoint with the same size as often as ``tune.FailureConfig(max_failures=...)`` allows.

    Raises:
        TypeError: ``train`` cannot be called, or ``scheduler`` is no scheduler.
        ValueError: ``checkpoint_every`` is below 1, ``timeout_s`` is not positive, or ``backend`` is unknown.
    """
    if not callable(train):
        raise TypeError(f"`train` is {train!r}, but must be a function of a Worker")
    if not isinstance(scheduler, (TrialScheduler, type(None))):
        raise TypeError(
            f"`scheduler` is {scheduler!r}, but must be one of Ray Tune's, such as a RASDAScheduler, or None"
        )
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"`checkpoint_every` is {checkpoint_every}, but must be >= 1")
    if timeout_s <= 0:
        raise ValueError(f"`timeout_s` is {timeout_s}, but must be > 0")
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"`backend` is {backend!r}, but must be 'gloo', 'nccl' or None")
    rule = scheduler.rule if isinstance(scheduler, RASDAScheduler) else None
    options = {
        "milestones": rule.milestones if rule else (),
        "workers": rule.workers if rule else None,
        "checkpoint_every": checkpoint_every,
        "timeout_s": timeout_s,
        "backend": backend,
    }

    def trainable(config: dict[str, Any], payload: Any = None) -> None:
        _run_trial(config, payload, options)

    trainable.__name__ = getattr(train, "__name__", type(train).__name__)
    payload = np.frombuffer(cloudpickle.dumps((train, data)), dtype=np.uint8)
    return tune.with_parameters(trainable, payload=payload)  # type: ignore[no-any-return]


def _run_trial(config: dict[str, Any], payload: Any, options: dict[str, Any]) -> None:
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", str(_LEAVE_S))
    context = tune.get_context()
    bundles = context.get_trial_resources().bundles
    digest = hashlib.sha256(payload).hexdigest()
    with _checkpoint_folder() as folder, contextlib.ExitStack() as stack:
        job = {
            **options,
            "workers": options["workers"] or len(bundles),
            "config": config,
            "trial": context.get_trial_id(),
            "rank": 0,
            "world_size": len(bundles),
            "store": (ray.util.get_node_ip_address(), 0),
            "checkpoint": folder,
            "gpus": bundles[0].get("GPU", 0),
            "threads": max(1, int(bundles[0].get("CPU", 1))),
        }
        seats = Seats(bundles, stack)
        head = stack.enter_context(fork_rank(digest, payload, job))
        _follow(head, seats, (digest, payload, job))


def _follow(head: Connection, seats: Seats, order: tuple[str, Any, dict[str, Any]]) -> None:
    """Hands rank 0's reports to Tune until every rank is done."""
    job, pid = order[2], None
    while True:
        if not wait([head], timeout=_LOOK_S):
            if seats.failed():
                raise RuntimeError(_diagnosis(job, seats, _last_words(head, pid)))
            continue
        kind, content = receive(head)
        if kind == "hello":
            pid = content
        elif kind == "store":
            seats.take(content, *order)
        elif kind == "report":
            _report(*content)
            head.send(None)
        elif kind == "done":
            break
        else:
            raise RuntimeError(_diagnosis(job, seats, (kind, content, "", pid)))
    if any(kind != "done" for kind, *_ in seats.endings(job["timeout_s"]).values()):
        raise RuntimeError(_diagnosis(job, seats, ("done", "", "", pid)))


def _report(metrics: dict[str, Any], folder: str | None) -> None:
    if folder is None:
        tune.report(metrics)
        return
    try:
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _last_words(head: Connection, pid: int | None) -> Ending:
    if not wait([head], timeout=_LAST_WORDS_S):
        return "silent", "", "", pid
    kind, content = receive(head)
    return (kind, content, "", pid) if kind in ("died", "error") else ("done", "", "", pid)


def _diagnosis(job: dict[str, Any], seats: Seats, first: Ending) -> str:
    """Names the rank that is to blame, rather than those that waited for it in vain."""
    endings = {0: first, **seats.endings(_LAST_WORDS_S)}
    rank = blame(endings)
    kind, words, host, pid = endings[rank]
    what = {"died": "died", "silent": f"did not answer for {job['timeout_s']} s"}.get(kind, "raised an error")
    process = f" (process {pid})" if pid else ""
    where = host or (seats.host(rank) if rank else socket.gethostname())
    return f"trial {job['trial']}: rank {rank} of {job['world_size']} on {where}{process} {what}\n{words}"


@contextlib.contextmanager
def _checkpoint_folder() -> Iterator[str | None]:
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield folder
