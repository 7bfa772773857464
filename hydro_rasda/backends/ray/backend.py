"""A Ray cluster as a pool of actors, one on each device, for the sweep and for full-size models.

A device has the resources of one worker: a GPU, or a group of CPU slots. Each rank of a full-size trial runs in an
actor that already exists, so that a trial grows without starting a process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from hydro_rasda.backends.pool import LOOK_S, Answer, DeviceDied, DevicePool
from hydro_rasda.backends.ray.actor_messages import Bulletin, Reporter
from hydro_rasda.backends.ray.nodes import Slots, answers, is_lost, living_nodes
from hydro_rasda.backends.ray.rank_actors import actor_options
from hydro_rasda.common.argument_checks import check_text, require
from hydro_rasda.common.import_path import import_path
from hydro_rasda.contracts import Devices
from hydro_rasda.data import Shard
from hydro_rasda.history.history import FINALISTS
from hydro_rasda.processes.die_with_parent import end_with_parent
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import worker_slots
from hydro_rasda.settings.config import Graph, check_steps
from hydro_rasda.training.device import DeviceShare, Given, Trainer
from hydro_rasda.training.distributed import Store, await_ranks, listening_store, reached_store
from hydro_rasda.training.group_training import Load


def worker_resources(nodes: Sequence[Mapping[str, float]], asked: Mapping[str, float] | None) -> dict[str, float]:
    """Return the resources of a device: `asked`, else a GPU if there are any, else the most common number of CPUs.

    >>> worker_resources([{"CPU": 4}, {"CPU": 16}, {"CPU": 16}], None)
    {'CPU': 16}
    >>> worker_resources([{"CPU": 4}, {"CPU": 16, "GPU": 8}], None)
    {'CPU': 1, 'GPU': 1}
    """
    if asked is not None:
        worker = dict(asked)
    elif any(node.get("GPU", 0) >= 1 for node in nodes):
        worker = {"CPU": 1, "GPU": 1}
    else:
        counts = Counter(int(node.get("CPU", 0)) for node in nodes)
        worker = {"CPU": max(counts, key=lambda cpus: (cpus > 0, counts[cpus], cpus))}
    require(
        worker_slots(nodes, worker) > 0,
        "resources_per_worker",
        worker,
        f"what one of the nodes has: {[dict(node) for node in nodes]}",
    )
    return worker


# Errors of Ray for an actor that died, that Ray killed to free memory, or whose node, with the answer, was lost.
_DEATHS = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError, ray.exceptions.ObjectLostError)


@dataclass(frozen=True)
class _ActorAnswer:
    """The coming answer of an actor; see `pool.Answer`."""

    future: Any

    def result(self) -> Any:
        try:
            return ray.get(self.future)
        except _DEATHS as death:
            raise DeviceDied(str(death)) from None


def share_on(node: Mapping[str, float], worker: Mapping[str, float]) -> DeviceShare:
    """Return a device's share of a GPU, or of the memory of its node.

    On CPUs, the "memory" of all workers that fit on the node limits the trainings on the node together. Ray also counts
    this memory when it starts other things there.

    >>> share_on({"CPU": 8, "memory": 40e9}, {"CPU": 2, "memory": 3e9})
    DeviceShare(processes=4, memory=12000000000.0)
    >>> share_on({"CPU": 16, "GPU": 4}, {"CPU": 1, "GPU": 0.5})
    DeviceShare(processes=2, memory=None)
    """
    fitting = max(1, worker_slots([node], worker))
    if (gpu := worker.get("GPU", 0)) > 0:
        return DeviceShare(min(fitting, max(1, int(1 / gpu + 1e-9))))
    return DeviceShare(fitting, fitting * worker["memory"] if worker.get("memory") else None)


class _TrainerActor(Trainer):
    def __init__(self, problem: Any, worker: Mapping[str, float], board: Any, device: int) -> None:
        # Without this, a process sometimes outlives its node, in spite of Ray's own check, and keeps the memory of its
        # GPU.
        end_with_parent()
        self._node = ray.get_runtime_context().get_node_id()
        node = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == self._node)
        where = torch.device("cuda" if worker.get("GPU", 0) > 0 else "cpu")
        self._reporter = Reporter(board, device)
        threads = max(1, int(worker.get("CPU", 0)))
        super().__init__(problem, where, threads, self._reporter.notify, share=share_on(node, worker))

    def do(self, method: str, *arguments: Any) -> Any:
        """Call a method of this trainer, and report its epochs and warnings to the tuner.

        If the arguments refer to checkpoints in Ray's store, these are fetched first.
        """
        with self._reporter.telling():
            return getattr(self, method)(*map(_fetched, arguments))

    def describe(self) -> tuple[str, int, str]:
        machine, cores, _ = super().describe()
        return machine, cores, self._node

    def host_meeting(self) -> tuple[str, int]:
        """Listen, as rank 0, for the other ranks of the next training; return the address."""
        host = ray.util.get_node_ip_address()
        self._hosted = listening_store(host)
        return host, self._hosted.port

    def _store(self, shard: Shard, meeting: tuple[str, int]) -> Store:
        store = reached_store(*meeting) if shard.rank else self._hosted
        await_ranks(store, shard.rank, shard.world)
        return store


class _Actor:
    """A device's process on a cluster; see `pool.DeviceProcess`."""

    def __init__(self, worker: Mapping[str, float], problem: Any, board: Any, device: int) -> None:
        self._actor = ray.remote(**actor_options(worker))(_TrainerActor).remote(problem, worker, board, device)

    def ask(self, method: str, *arguments: Any) -> _ActorAnswer:
        return _ActorAnswer(self._actor.do.remote(method, *arguments))

    def end(self) -> None:
        ray.kill(self._actor)


class RayDevices(DevicePool):
    """Train on all devices of a cluster.

    If nodes end, a full-size trial gets at most the workers of the living nodes.
    """

    def __init__(self, run: Run, worker: Mapping[str, float], count: int) -> None:
        # Use gloo if a worker has a part of a GPU: NCCL refuses two ranks on one GPU.
        super().__init__(run, count, "nccl" if worker.get("GPU", 0) >= 1 else "gloo", grows=True)
        self._worker, self._slots = worker, Slots(worker)
        self._problem, self._bulletin = ray.put(run.problem), Bulletin()

    def _process(self, device: int) -> _Actor:
        return _Actor(self._worker, self._problem, self._bulletin.board, device)

    def _capacity(self) -> int:
        return max(1, min((len(self._devices) or self._count) - len(self._late), self._slots.count()))

    def _is_lost(self, device: int) -> bool:
        node = self._devices[device].node
        return bool(node) and is_lost(node)

    def _take_ready(self) -> None:
        super()._take_ready()
        for device in range(len(self._devices), self._slots.count()):  # devices of new nodes
            self._devices[device] = self._opened(device)

    def _ready(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        of = {answer.future: answer for answer in answers if isinstance(answer, _ActorAnswer)}
        news = self._bulletin.coming
        ready, _ = ray.wait([news, *of], num_returns=1, timeout=LOOK_S)
        if news in ready:
            for message in self._bulletin.read():
                self._hear(*message)
            ready, _ = ray.wait([*of], num_returns=1, timeout=0) if of else ([], [])
        return [of[future] for future in ready]

    def _load(self, keys: Iterable[str]) -> Load:
        return _Stored({key: ray.put(self._run.store.load(key, "cpu")) for key in keys})

    def _meeting(self, devices: Sequence[int]) -> Any:
        answer: Any = self._devices[devices[0]].process.ask("host_meeting")
        return answer.future

    def close(self) -> None:
        super().close()
        self._bulletin.close()


@dataclass(frozen=True)
class _Stored:
    """Checkpoints that the tuner has put once into Ray's store, for all ranks; see `Given.load`.

    An actor fetches them before it trains. If its forks fetched them, they would all talk to the store through one
    socket, which crashes the node.
    """

    futures: Mapping[str, Any]

    def __call__(self, key: str) -> Any:
        return ray.get(self.futures[key])


def _fetched(argument: Any) -> Any:
    """Return an actor's argument, with checkpoints fetched from Ray's store."""
    if isinstance(argument, Given) and isinstance(argument.load, _Stored):
        states = {key: argument.load(key) for key in argument.load.futures}
        return replace(argument, load=states.__getitem__)
    return argument


_ANSWER_S = 10.0
_HEAD_ASKED_EVERY_S = 2.0
_HEAD_ANSWERS_WITHIN_S = 5.0
_HEAD_MISSES = 3


class RayBackend:
    """A Ray cluster. An actor on each device trains groups of the sweep, then full-size models.

    It decides like the local backend. Full-size trials grow, up to all devices of the cluster if `race.max_workers` is
    None. A cluster of one device gives the same result as one local device, to the last digit.

    Args:
        address: Address of a running cluster. None starts Ray on this machine, and stops it at the end. If this process
            is already connected to Ray, that connection is used.
        resources_per_worker: Resources of a worker, such as {"CPU": 4, "GPU": 1}; a device of the sweep has the same.
            None: one GPU if the cluster has any, else all CPUs of a node. On CPUs, "memory" limits the bytes of all
            models that a device trains at the same time. With {"GPU": 0.5}, two workers share a GPU, each with half of
            its memory (not yet run).
        loader_workers: See `LocalBackend`.
        graph: See `LocalBackend`. True is not refused here, because other machines may have GPUs.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        address: str | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        loader_workers: int | None = None,
        graph: Graph = "auto",
    ) -> None:
        check_text("address", address, optional=True)
        client = address is not None and address.startswith("ray://")
        rule = "the address of a head, such as '10.0.0.1:6379': Ray Client is not supported, but `ray job submit` is"
        require(not client, "address", address, rule)
        if resources_per_worker is not None:
            worker_slots((), resources_per_worker)
        check_steps(graph, loader_workers)
        self.address, self.resources_per_worker = address, resources_per_worker
        self.loader_workers, self.graph = loader_workers, graph

    @contextlib.contextmanager
    def open(self, run: Run) -> Iterator[Devices]:
        """Connect to the cluster, and start its devices."""
        with _connected(self.address), head_watched(ray.get_runtime_context().gcs_address):
            nodes = living_nodes(self.resources_per_worker or ())
            worker = worker_resources(nodes, self.resources_per_worker)
            count, workers = worker_slots(nodes, worker), run.settings.race.workers
            require(workers <= count, "race.workers", workers, f"<= {count}, the workers of {worker} there are")
            with contextlib.closing(RayDevices(run, worker, count)) as devices:
                # If a resumed run already has its finalists, start no device yet, because it may need none.
                if not any(key.startswith(FINALISTS) for key in run.store.units()):
                    devices.begin()
                yield devices


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Within the context, connect this process to the cluster at `address`.

    If `address` is None, use the connection that this process already has, or else start Ray on this machine.
    """
    if ray.is_initialized():
        require(address is None, "address", address, "None: this process is connected to Ray already")
        yield
        return
    _start_ray(address)
    try:
        yield
    finally:
        ray.shutdown()


def _start_ray(address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Let Ray log only errors: the run itself reports its progress, and failures with their tracebacks.
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        # Ray gets as many CPU slots as this process has threads. Its workers get this process's path for modules.
        with _environment(PYTHONPATH=import_path()):
            ray.init(address="local", num_cpus=torch.get_num_threads(), include_dashboard=False, **options)
        return
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():  # fail within `_ANSWER_S`; Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        ray.init(address=address, **options)
    except OSError as error:
        raise ConnectionError(f"`address` is {address!r}, but no Ray cluster answers there: {error}") from error


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def head_watched(address: str) -> Iterator[None]:
    """Within the context, watch Ray's head at "host:port". If it stops answering, print to stderr what to do."""
    over = threading.Event()
    thread = threading.Thread(target=_watch_head, args=(address, over), name="head watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch_head(address: str, over: threading.Event) -> None:
    misses = 0
    while misses < _HEAD_MISSES:
        if over.wait(_HEAD_ASKED_EVERY_S):
            return
        misses = 0 if _head_answers(address) else misses + 1
    print(
        f"Ray's head at {address} does not answer any more. Unless it comes back, Ray ends this process within "
        "minutes. The run is kept: once a cluster runs again, the same call goes on with it.",
        file=sys.stderr,
        flush=True,
    )


def _head_answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return answers(host.strip("[]"), int(port), _HEAD_ANSWERS_WITHIN_S)
