"""A Ray cluster: fused groups on all of its devices, then full-size trials under DDP in Ray Tune."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import ray
import torch
from ray.tune.schedulers import TrialScheduler

from ..config import require
from ..run import Run
from ..schedulers import worker_slots
from ..sweep import FINALISTS, Finished
from ..targets import recall_targets, settle_configs, targets_over, train_targets, tried_targets
from .full_size import train_full_size
from .ray_devices import RayDevices, worker_resources
from .ray_named import make_scheduler
from .ray_sizes import living_nodes
from .ray_targets import FullSize

EAGER_SHARE = 0.5
"""Of the sweep's epochs: from here on, devices that it leaves idle train the best so far at full size (Hydro's eager
transfer)."""

_ANSWER_S = 10.0


class RayBackend(RayDevices):
    """Devices of a Ray cluster: one actor each for the sweep, then one worker each for the full-size trials.

    On a cluster of one device, all decisions are those of the local backend.

    Args:
        run: What to train.
        address: Of a running cluster; None starts Ray on this machine, and stops it again. A Ray that this process is
            connected to already is used as it is.
        resources_per_worker: Resources of a device; None as `worker_resources` finds.
        scheduler: Of the full-size trials: "rasda", another of Ray's by name, or an object.
        space: The search space.

    Raises:
        ValueError: on entering, where no node has such a device, the cluster has fewer than `rasda.workers` of them, or
            no scheduler has that name.
        TypeError: on entering, where `scheduler` is none.
        ConnectionError: on entering, where there is no cluster at `address`.
    """

    def __init__(
        self,
        run: Run,
        address: str | None,
        resources_per_worker: Mapping[str, float] | None,
        scheduler: str | TrialScheduler,
        space: Mapping[str, Any],
    ) -> None:
        super().__init__(run)
        self._address, self._asked, self._scheduler, self._space = address, resources_per_worker, scheduler, space
        self._owns_ray = False
        self._share = 0.0
        self._best: Sequence[int] = ()
        self._stage: FullSize | None = None

    def __enter__(self) -> RayBackend:
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _start_ray(self._address)
        else:
            require(self._address is None, "address", self._address, "None: this process is connected to Ray already")
        try:
            nodes = living_nodes()
            worker = worker_resources(nodes, self._asked)
            make_scheduler(self._scheduler, self._run.settings, worker, self._space)
            self._count = worker_slots(nodes, worker)
            workers = self._run.settings.rasda.workers
            require(
                workers <= self._count, "rasda.workers", workers, f"<= {self._count}, the workers of {worker} there are"
            )
            # A run whose finalists are known may need no devices; one that was given more samples or time does.
            known = any(key.startswith(FINALISTS) for key in self._run.store.units())
            self.open(worker, self._count, now=not known or self._alone())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stage is not None:
            self._stage.stop()
        self.retire_all()
        if self._owns_ray:
            ray.shutdown()

    def finished(self) -> list[Finished]:
        """See `RayDevices`; devices that the sweep leaves idle late in it go over to the full-size trials."""
        # A sweep at full width is full-size training already, with which the finalists go on.
        if self._share >= EAGER_SHARE and not self._alone() and self._run.problem.width_ratio < 1:
            self._transfer()
        if self._stage is not None:
            self._stage.poll()
        return super().finished()

    def told(self, share: float, best: Sequence[int]) -> None:
        self._share, self._best = share, best

    def train_targets(self, finalists: Sequence[int]) -> list[int]:
        """Train the full-size models, also those begun early; all that were begun."""
        if self._alone():
            return train_targets(self._run, finalists, self)
        self.retire_all()
        self._race(finalists)
        return tried_targets(self._run, finalists)

    def _race(self, finalists: Sequence[int]) -> None:
        if self._stage is None:
            recall_targets(self._run)
            if targets_over(self._run, finalists):
                settle_configs(self._run)
                return
        stage = self._full_size()
        stage.hold(0)
        stage.offer(finalists)
        stage.finish(finalists)

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
            train = partial(train_full_size, rule=self._run.settings.rasda.lr_rule)
            self._stage = FullSize(self._run, self._worker, self._scheduler, space=self._space, train=train)
        return self._stage


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
