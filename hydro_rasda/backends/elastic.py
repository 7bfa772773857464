"""A training function as a Ray Tune trainable that uses as many workers as its trial has.

This file runs in the trials' actors, and is pickled by value: an actor that imported the package would
import torch, which takes longer than all else that a resize does. Training happens in ranks forked of each
node's warm process (:mod:`hydro_rasda.backends.zygote`): rank 0 next to the trial's actor, each other one
next to a seat, an actor that holds one bundle of the trial's placement group, so that Ray's books are
right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import cloudpickle, tune
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from hydro_rasda.backends.ray_scheduler import RASDAScheduler
    from hydro_rasda.backends.worker import Worker

cloudpickle.register_pickle_by_value(sys.modules[__name__])

_WARM_UP_S = 120.0
_LAST_WORDS_S = 3.0
_CHECKPOINT_FILE = "worker.pt"  # as in worker.py, which must not be imported here

_Orders = tuple[str, Any, dict[str, Any]]


def elastic(
    train: Callable[[Worker], None],
    scheduler: RASDAScheduler,
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
        scheduler: The scheduler of the same tuner: its milestones say when to save.
        data: Anything picklable, handed to each rank as ``worker.data``. Held once on each node, not once
            per trial.
        checkpoint_every: Also save every so many iterations, for safety from crashes; None to save only
            where a trial
            may pause and at its end.
        timeout_s: A rank that the others wait for longer is taken for dead.
        backend: "gloo" or "nccl"; None for NCCL on GPUs and gloo elsewhere.

    Returns:
        A trainable for ``tune.Tuner``. A trial whose rank dies or hangs fails, and goes on from its last
        checkpoint with the same size as often as ``tune.FailureConfig(max_failures=...)`` allows.

    Raises:
        TypeError: ``train`` cannot be called.
        ValueError: ``checkpoint_every`` is below 1, ``timeout_s`` is not positive, or ``backend`` is unknown.
    """
    if not callable(train):
        raise TypeError(f"`train` is {train!r}, but must be a function of a Worker")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"`checkpoint_every` is {checkpoint_every}, but must be >= 1")
    if timeout_s <= 0:
        raise ValueError(f"`timeout_s` is {timeout_s}, but must be > 0")
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"`backend` is {backend!r}, but must be 'gloo', 'nccl' or None")
    options = {
        "milestones": scheduler.rule.milestones,
        "workers": scheduler.rule.workers,
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
    context = tune.get_context()
    bundles = context.get_trial_resources().bundles
    digest = hashlib.sha256(payload).hexdigest()
    with _checkpoint_folder() as folder, contextlib.ExitStack() as stack:
        job = {
            **options,
            "config": config,
            "trial": context.get_trial_id(),
            "rank": 0,
            "world_size": len(bundles),
            "store": (ray.util.get_node_ip_address(), 0),
            "checkpoint": folder,
            "gpus": bundles[0].get("GPU", 0),
            "threads": max(1, int(bundles[0].get("CPU", 1))),
        }
        seats = _open_seats(bundles, stack)
        head = stack.enter_context(_fork_rank(digest, payload, job))
        _follow(head, seats, (digest, payload, job))


def _follow(head: Connection, seats: list[Any], orders: _Orders) -> None:
    """Hands rank 0's reports to Tune until every rank is done."""
    outcomes: dict[Any, int] = {}
    pid = None
    while True:
        kind, content = _next_message(head, outcomes)
        if kind == "hello":
            pid = content
        elif kind == "store":
            outcomes = _take_seats(seats, content, orders)
        elif kind == "report":
            _report(*content)
            head.send(None)
        elif kind == "done":
            break
        else:
            raise RuntimeError(_diagnosis(orders[2], outcomes, {0: (kind, content, socket.gethostname(), pid)}))
    if outcomes and (late := _ended(outcomes, timeout=orders[2]["timeout_s"])):
        raise RuntimeError(_diagnosis(orders[2], outcomes, late))


def _report(metrics: dict[str, Any], folder: str | None) -> None:
    if folder is None:
        tune.report(metrics)
        return
    try:
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _next_message(head: Connection, outcomes: dict[Any, int]) -> tuple[str, Any]:
    while True:
        if wait([head], timeout=0.5):
            return _receive(head)
        if failed := _ended(outcomes, timeout=0):
            return "peer", failed


def _receive(connection: Connection) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = connection.recv()
    except (EOFError, OSError):
        return "died", None
    return message


def _ended(outcomes: dict[Any, int], timeout: float) -> dict[int, tuple[str, Any, str, int | None]]:
    """Ranks in seats that ended otherwise than by being done."""
    if not outcomes:
        return {}
    ready, late = ray.wait(list(outcomes), num_returns=len(outcomes), timeout=timeout)
    ended = {}
    for future in ready:
        try:
            outcome = ray.get(future)
        except ray.exceptions.RayError as error:
            outcome = ("died", str(error), "a lost node", None)
        if outcome[0] != "done":
            ended[outcomes[future]] = outcome
    if timeout:
        ended |= {outcomes[future]: ("silent", None, "its node", None) for future in late}
    return ended


def _diagnosis(job: dict[str, Any], outcomes: dict[Any, int], known: dict[int, Any]) -> str:
    """Which rank is to blame: one that died or is silent, rather than those that waited for it."""
    if known.get(0, ("",))[0] == "peer":
        known = {}
    ended = known | _ended(outcomes, timeout=_LAST_WORDS_S)
    order = {"died": 0, "silent": 1, "error": 2}
    rank = min(ended, key=lambda r: (order.get(ended[r][0], 3), r))
    kind, text, host, pid = ended[rank]
    what = {"died": "died", "silent": f"did not answer for {job['timeout_s']} s"}.get(kind, "raised an error")
    process = f" (process {pid})" if pid else ""
    return f"trial {job['trial']}: rank {rank} of {job['world_size']} on {host}{process} {what}\n{text or ''}"


class _Seat:
    """Holds one bundle of a trial, and runs one rank there."""

    def run(
        self, digest: str, payload: Any, saved: bytes | None, job: dict[str, Any]
    ) -> tuple[str, Any, str, int | None]:
        """How the rank ended ("done", "died" or "error"), its last words, its host and process."""
        with contextlib.ExitStack() as stack:
            if saved is not None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hydro_rasda-"))
                with open(os.path.join(folder, _CHECKPOINT_FILE), "wb") as file:
                    file.write(saved)
                job = {**job, "checkpoint": folder}
            rank = stack.enter_context(_fork_rank(digest, payload, job))
            pid, kind, content = None, "", None
            while kind not in ("done", "died", "error"):
                kind, content = _receive(rank)
                pid = content if kind == "hello" else pid
        return kind, content, socket.gethostname(), pid


def _open_seats(bundles: list[dict[str, float]], stack: contextlib.ExitStack) -> list[Any]:
    group = ray.util.get_current_placement_group()
    seats = []
    for index, bundle in enumerate(bundles[1:], start=1):
        more = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        actor = ray.remote(num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), resources=more)(_Seat)
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        seats.append(actor.options(scheduling_strategy=place).remote())
        stack.callback(ray.kill, seats[-1])
    return seats


def _take_seats(seats: list[Any], store: tuple[str, int], orders: _Orders) -> dict[Any, int]:
    """Starts ranks 1, 2, ... in their seats; a future of each one's outcome, and its rank."""
    if not seats:
        return {}
    digest, payload, job = orders
    node_of = ray.util.placement_group_table(ray.util.get_current_placement_group())["bundles_to_node_id"]
    if len(set(node_of.values())) > 1:
        far = (ray.put(payload), ray.put(_saved_bytes(job["checkpoint"])))
    futures = {}
    for rank, seat in enumerate(seats, start=1):
        # The warm process next door has the payload from rank 0, and the checkpoint's folder is its own.
        near = node_of[rank] == node_of[0]
        order = {**job, "rank": rank, "store": store, "checkpoint": job["checkpoint"] if near else None}
        futures[seat.run.remote(digest, *((None, None) if near else far), order)] = rank
    return futures


def _saved_bytes(folder: str | None) -> bytes | None:
    if folder is None:
        return None
    with open(os.path.join(folder, _CHECKPOINT_FILE), "rb") as file:
        return file.read()


@contextlib.contextmanager
def _checkpoint_folder() -> Iterator[str | None]:
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield folder


@contextlib.contextmanager
def _fork_rank(digest: str, payload: Any, job: dict[str, Any]) -> Iterator[Connection]:
    """A connection to a new rank, which ends with it."""
    job = {**job, "environ": dict(os.environ), "cwd": os.getcwd()}
    connection, answer = _handshake((digest, job), time.monotonic() + _WARM_UP_S)
    with connection:
        if answer == "need":
            connection.send_bytes(payload)
        yield connection


def _handshake(request: tuple[str, dict[str, Any]], deadline: float) -> tuple[Connection, str]:
    while True:
        connection = _connect(deadline)
        try:
            connection.send(request)
            return connection, connection.recv()[0]
        except (EOFError, OSError):
            connection.close()  # a warm process that ended as idle just then; the next one will answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"the warm process on {socket.gethostname()} did not answer for {_WARM_UP_S} s")


def _connect(deadline: float) -> Connection:
    path = _socket_path()
    while True:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(path)
            # The rank writes where this process does, so that Ray shows what the training function prints.
            socket.send_fds(client, [b"2"], [1, 2])
            return Connection(client.detach())
        except OSError:
            client.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"no warm process came up on {socket.gethostname()} in {_WARM_UP_S} s; see {path}.log")
        _start_zygote(path)
        time.sleep(0.02)


def _socket_path() -> str:
    """One warm process for each user, Ray session and Python path on a node."""
    folder = os.path.join(tempfile.gettempdir(), f"hydro_rasda-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    owned = os.stat(folder)
    if owned.st_uid != os.getuid() or owned.st_mode & 0o077:
        raise PermissionError(f"{folder} must belong to this user alone: whoever writes there can run code")
    key = repr((os.getppid(), sys.executable, sys.path))
    return os.path.join(folder, hashlib.sha256(key.encode()).hexdigest()[:16])


def _start_zygote(path: str) -> None:
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)  # somebody else's is on its way
        return
    command = [sys.executable, "-m", "hydro_rasda.backends.zygote", path, str(os.getppid())]
    # One thread each: numeric libraries that start a pool on import would not survive the forks.
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with open(f"{path}.log", "ab") as log:
        subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock,), check=True
        )
    os.close(lock)
