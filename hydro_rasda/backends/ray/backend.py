"""A Ray cluster: fused groups on all of its devices, then full-size trials under DDP in Ray Tune."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ray
import torch
from ray.tune.schedulers import TrialScheduler

from hydro_rasda.backends.ray.devices import RayDevices, worker_resources
from hydro_rasda.backends.ray.full_size import FOLDER, FullSize
from hydro_rasda.backends.ray.head_watch import head_watched
from hydro_rasda.backends.ray.schedulers_by_name import check_scheduler, make_scheduler
from hydro_rasda.backends.ray.sizes import living_nodes
from hydro_rasda.checks import check_text, require
from hydro_rasda.contracts import Finished
from hydro_rasda.run.files import refuse_links, refuse_open_to_others
from hydro_rasda.run.state import FINALISTS, Run
from hydro_rasda.run.summary import winner_is_lost
from hydro_rasda.run.targets import another_chance, end_targets, recall_targets, settle_configs, targets_over
from hydro_rasda.schedulers import worker_slots
from hydro_rasda.training.ddp import train_full_size
from hydro_rasda.training.own_loop import train_own_on_rank

EAGER_SHARE = 0.5
"""Of the sweep's epochs: from here on, devices that it leaves idle train the best so far at full size (Hydro's eager
transfer)."""

_ANSWER_S = 10.0


class RayBackend:
    """A Ray cluster: one actor on each device for the sweep, then one worker on each for the full-size trials.

    On a cluster of one device, all decisions are those of the local backend.

    Args:
        address: Of a running cluster; None starts Ray on this machine, and stops it again. A Ray that this process is
            connected to already is used as it is.
        resources_per_worker: What Ray gives a worker, which is also a device of the sweep: {"CPU": 4, "GPU": 1}; None:
            a GPU where the cluster has any, else all CPUs of a node. On CPUs, "memory" bounds the bytes of what a
            device trains at the same time. With {"GPU": 0.5}, two workers share a GPU, each with half of its memory
            (not yet run).
        scheduler: Of the full-size trials: "rasda"; "asha", "hyperband", "median" or "pbt"; or one of Ray Tune's
            schedulers. All but RASDA train on `rasda.workers` throughout.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        address: str | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        scheduler: str | TrialScheduler = "rasda",
    ) -> None:
        check_text("address", address, optional=True)
        if resources_per_worker is not None:
            worker_slots((), resources_per_worker)
        check_scheduler(scheduler)
        self.address, self.resources_per_worker, self.scheduler = address, resources_per_worker, scheduler

    @contextlib.contextmanager
    def open(self, run: Run) -> Iterator[RacingDevices]:
        """Connect to the cluster, and start its devices.

        Raises:
            ValueError: where no node has such a device, the cluster has fewer than `rasda.workers` of them, or no
                scheduler has that name.
            ConnectionError: where there is no cluster at `address`.
            Unsafe: where others can write to the run's folder, in which Ray keeps pickled files.
        """
        refuse_open_to_others(run.store.path)
        refuse_links(run.store.path / FOLDER)
        with _connected(self.address), head_watched(ray.get_runtime_context().gcs_address):
            nodes = living_nodes()
            worker = worker_resources(nodes, self.resources_per_worker)
            make_scheduler(self.scheduler, run.settings, worker, run.space)
            count, workers = worker_slots(nodes, worker), run.settings.rasda.workers
            require(workers <= count, "rasda.workers", workers, f"<= {count}, the workers of {worker} there are")
            devices = RacingDevices(run, worker, count, self.scheduler)
            try:
                devices.begin_as_needed()
                yield devices
            finally:
                devices.close()


class RacingDevices(RayDevices):
    """The devices of a cluster, which go over from the sweep to the full-size trials.

    Args:
        run: What to train.
        worker: Resources of a device.
        count: Number of devices.
        scheduler: Of the full-size trials; see `make_scheduler`.
    """

    def __init__(self, run: Run, worker: Mapping[str, float], count: int, scheduler: str | TrialScheduler) -> None:
        super().__init__(run, worker, count)
        self._scheduler = scheduler
        self._share = 0.0
        self._best: Sequence[int] = ()
        self._stage: FullSize | None = None

    def begin_as_needed(self) -> None:
        """Start the devices, unless none may be needed: in a run whose finalists are known, given no more samples."""
        known = any(key.startswith(FINALISTS) for key in self._run.store.units())
        if not known or self._alone():
            self.begin()

    def close(self) -> None:
        """End everything that runs there."""
        if self._stage is not None:
            self._stage.stop()
        super().close()

    def finished(self) -> Sequence[Finished]:
        """See `RayDevices`; devices that the sweep leaves idle late in it go over to the full-size trials."""
        # A sweep at full width is full-size training already, with which the finalists go on.
        if self._share >= EAGER_SHARE and not self._alone() and self._run.settings.surrogate < 1:
            self._transfer()
        if self._stage is not None:
            self._stage.poll()
        return super().finished()

    def on_progress(self, share: float, best: Sequence[int]) -> None:
        self._share, self._best = share, best

    def race(self, finalists: Sequence[int]) -> bool:
        """Train the full-size models in Ray Tune, also those begun early; on one device, there is no race."""
        if self._alone():
            return False
        super().close()
        if self._stage is None:
            recall_targets(self._run)
            again = another_chance(self._run, finalists) or winner_is_lost(self._run, finalists)
            if targets_over(self._run, finalists) and not again:
                settle_configs(self._run)
                end_targets(self._run, finalists)
                return True
        stage = self._full_size()
        stage.hold(0)
        stage.offer(finalists)
        stage.finish(finalists)
        return True

    def _alone(self) -> bool:
        """Whether full-size trials can only train one after another, where halving need not be asynchronous."""
        return self._count == 1 and self._scheduler == "rasda"

    def _transfer(self) -> None:
        """Start the best so far on devices that the sweep has no use for."""
        for device in self.idle():
            self.retire(device)
        # Those that wait for a device could be overtaken by better ones: no more are offered than can begin.
        room = (self._count - len(self._devices)) // self._run.settings.rasda.workers
        if room:
            stage = self._full_size()
            stage.hold(len(self._devices))
            stage.offer(self._best[:room])

    def _full_size(self) -> FullSize:
        if self._stage is None:
            own_loop = self._run.problem.full_size is not None
            ours = partial(train_full_size, rule=self._run.settings.rasda.lr_rule)
            train = train_own_on_rank if own_loop else ours
            self._stage = FullSize(self._run, self._worker, self._scheduler, space=self._run.space, train=train)
        return self._stage


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
