"""The devices of a Ray cluster, each with one actor that trains groups of surrogates.

A device is what one worker of a full-size trial gets: a GPU, or a group of CPU slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from hydro_rasda.backends.pool import LOOK_S, Answer, DeviceDied, DevicePool
from hydro_rasda.backends.ray.ranks import actor_options
from hydro_rasda.checks import require
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import worker_slots
from hydro_rasda.training.device import Share
from hydro_rasda.training.fused import Load
from hydro_rasda.training.trainer import Trainer


def worker_resources(nodes: Sequence[Mapping[str, float]], asked: Mapping[str, float] | None) -> dict[str, float]:
    """Resources of one device: those asked for, else a GPU where there is any, else all CPUs of a usual node.

    Args:
        nodes: Resources of each node of the cluster, in Ray's words.
        asked: `resources_per_worker`.

    Raises:
        ValueError: where no node has as much.

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


@dataclass(frozen=True)
class _Answer:
    """What an actor will have given; see `pool.Answer`."""

    future: Any

    def result(self) -> Any:
        try:
            return ray.get(self.future)
        except ray.exceptions.RayActorError as death:
            raise DeviceDied(str(death)) from None


def share_on(node: Mapping[str, float], worker: Mapping[str, float]) -> Share:
    """What a device has of what it shares with others: a GPU, or the memory of its node.

    Args:
        node: Resources of its node, in Ray's words.
        worker: Its own; `memory` bounds what trains there at the same time, as well as what Ray starts beside it.

    >>> share_on({"CPU": 8, "memory": 40e9}, {"CPU": 2, "memory": 3e9})
    Share(processes=4, memory=12000000000.0)
    >>> share_on({"CPU": 16, "GPU": 4}, {"CPU": 1, "GPU": 0.5})
    Share(processes=2, memory=None)
    """
    fitting = max(1, worker_slots([node], worker))
    if (gpu := worker.get("GPU", 0)) > 0:
        return Share(min(fitting, max(1, int(1 / gpu + 1e-9))))
    return Share(fitting, fitting * worker["memory"] if worker.get("memory") else None)


class _Trainer(Trainer):
    """Trains on what Ray gave its actor."""

    def __init__(self, problem: Any, worker: Mapping[str, float]) -> None:
        here = ray.get_runtime_context().get_node_id()
        node = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
        where = torch.device("cuda" if worker.get("GPU", 0) > 0 else "cpu")
        super().__init__(problem, where, max(1, int(worker.get("CPU", 0))), share=share_on(node, worker))


class _Actor:
    """A device's process on a cluster; see `pool.DeviceProcess`."""

    def __init__(self, worker: Mapping[str, float], problem: Any) -> None:
        self._actor = ray.remote(**actor_options(worker))(_Trainer).remote(problem, worker)

    def ask(self, method: str, *arguments: Any) -> _Answer:
        return _Answer(getattr(self._actor, method).remote(*arguments))

    def end(self) -> None:
        ray.kill(self._actor)


class RayDevices(DevicePool):
    """Trains groups on all devices of a cluster.

    Args:
        run: Whose trials they train.
        worker: Resources of a device, in Ray's words.
        count: Number of devices.
    """

    def __init__(self, run: Run, worker: Mapping[str, float], count: int) -> None:
        super().__init__(run, count)
        self._worker, self._problem = worker, ray.put(run.problem)

    def _process(self, device: int) -> _Actor:
        return _Actor(self._worker, self._problem)

    def _ready(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        of = {answer.future: answer for answer in answers if isinstance(answer, _Answer)}
        ready, _ = ray.wait(list(of), num_returns=1, timeout=LOOK_S) if of else ([], [])
        return [of[future] for future in ready]

    def _load(self, keys: Iterable[str]) -> Load:
        return {key: self._run.store.load(key) for key in keys}.__getitem__
