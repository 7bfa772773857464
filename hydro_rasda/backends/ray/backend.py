"""A Ray cluster, as a pool of actors: one on each device, for the sweep and for the full-size models."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import ray
import torch

from hydro_rasda.backends.ray.devices import RayDevices, worker_resources
from hydro_rasda.backends.ray.nodes import living_nodes
from hydro_rasda.checks import check_text, require
from hydro_rasda.config import Graph, check_steps
from hydro_rasda.contracts import Devices
from hydro_rasda.renames import NO_SCHEDULER, refuses
from hydro_rasda.run.state import FINALISTS, Run
from hydro_rasda.schedulers import worker_slots

_ANSWER_S = 10.0
_HEAD_ASKED_EVERY_S = 2.0
_HEAD_ANSWERS_WITHIN_S = 5.0
_HEAD_MISSES = 3


class RayBackend:
    """A Ray cluster: an actor on each device trains groups of the sweep, then full-size models.

    All decisions are those of the local backend. Full-size trials grow: where `race.max_workers` is None, up to all
    devices of the cluster. On a cluster of one device, the answer is that of one local device, to the last digit.

    Args:
        address: Of a running cluster; None starts Ray on this machine, and stops it again. A Ray that this process is
            connected to already is used as it is.
        resources_per_worker: Resources of a worker, which is also a device of the sweep: {"CPU": 4, "GPU": 1}; None:
            a GPU where the cluster has any, else all CPUs of a node. On CPUs, "memory" bounds the bytes of what a
            device trains at the same time. With {"GPU": 0.5}, two workers share a GPU, each with half of its memory
            (not yet run).
        loader_workers: As for `LocalBackend`.
        graph: As for `LocalBackend`; True is not refused here, since other machines may have GPUs.
    """

    device = torch.device("cpu")

    @refuses(scheduler=NO_SCHEDULER)
    def __init__(
        self,
        address: str | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        loader_workers: int | None = None,
        graph: Graph = "auto",
    ) -> None:
        check_text("address", address, optional=True)
        if resources_per_worker is not None:
            worker_slots((), resources_per_worker)
        check_steps(graph, loader_workers)
        self.address, self.resources_per_worker = address, resources_per_worker
        self.loader_workers, self.graph = loader_workers, graph

    @contextlib.contextmanager
    def open(self, run: Run) -> Iterator[Devices]:
        """Connect to the cluster, and start its devices."""
        with _connected(self.address), head_watched(ray.get_runtime_context().gcs_address):
            nodes = living_nodes()
            worker = worker_resources(nodes, self.resources_per_worker)
            count, workers = worker_slots(nodes, worker), run.settings.race.workers
            require(workers <= count, "race.workers", workers, f"<= {count}, the workers of {worker} there are")
            with contextlib.closing(RayDevices(run, worker, count)) as devices:
                # A run whose finalists are known may need none.
                if not any(key.startswith(FINALISTS) for key in run.store.units()):
                    devices.begin()
                yield devices


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Within it, this process is connected to the cluster, or to one that was started for it."""
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
    # The run tells what happens in its own words; what fails, with its traceback.
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        # As many CPU slots as this process would train with, and modules found where it finds them.
        with _environment(PYTHONPATH=os.pathsep.join(sys.path)):
            ray.init(address="local", num_cpus=torch.get_num_threads(), include_dashboard=False, **options)
        return
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():  # Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
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
    """Within it, a line on stderr tells where the head at "host:port" does not answer any more, and what to do."""
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
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_ANSWERS_WITHIN_S).close()
    except OSError:
        return False
    return True
