"""The devices of a Ray cluster, each with one actor that trains groups of surrogates.

A device is what one worker of a full-size trial gets: a GPU, or a group of CPU slots.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import ray

from ..config import require
from ..fused import GroupOutcome, GroupTask, group_key
from ..grouping import Widths
from ..problem import Trial
from ..run import Run, Stage
from ..schedulers import worker_slots
from ..single import TargetOutcome, TargetTask
from ..sweep import Finished
from .device import DEATHS, told_of_deaths
from .ray_trainer import Given, Trainer

_LOOK_S = 0.5


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


@dataclass
class _Device:
    actor: Any
    arrival: Any  # the future of the actor's first answer; None once it is there
    machine: str = ""
    cores: int = 1
    task: GroupTask | None = None
    future: Any = None


class RayDevices:
    """Trains groups on all devices of a cluster.

    A device whose process dies gets a new one, and what it trained goes to whichever device is free.

    Args:
        run: Whose trials they train.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._devices: dict[int, _Device] = {}
        self._speeds: dict[tuple[int, str], float] = {}
        self._again: list[GroupTask] = []
        self._deaths: Counter[str] = Counter()
        self._worker: Mapping[str, float] = {}
        self._problem: Any = None
        self._count = 0
        self._met = False

    def open(self, worker: Mapping[str, float], count: int, *, now: bool = True) -> None:
        """Start so many actors with these resources, now, or when they are first asked for; returns at once."""
        self._worker, self._count, self._problem = worker, count, ray.put(self._run.problem)
        if now:
            self._devices = {device: self._opened() for device in range(count)}

    def _opened(self) -> _Device:
        other = {name: amount for name, amount in self._worker.items() if name not in ("CPU", "GPU")}
        cpus, gpus = self._worker.get("CPU", 0), self._worker.get("GPU", 0)
        cls = ray.remote(num_cpus=cpus, num_gpus=gpus, resources=other)(Trainer)
        actor = cls.remote(self._problem, max(1, int(cpus)))
        return _Device(actor, actor.describe.remote())

    def _meet(self) -> None:
        """Wait, once, until every device is there: the first would else take all work."""
        if self._met:
            return
        self._met = True
        if not self._devices:
            self._devices = {device: self._opened() for device in range(self._count)}
        for device in self._devices.values():
            try:
                self._greet(device)
            except ray.exceptions.RayActorError as error:
                raise RuntimeError(f"the process of a device did not start:\n{error}") from None

    def _greet(self, device: _Device) -> None:
        (device.machine, device.cores), device.arrival = ray.get(device.arrival), None

    def idle(self) -> Sequence[int]:
        self._meet()
        if self._again:
            return []
        return [d for d, device in self._devices.items() if device.task is None and device.arrival is None]

    def busy(self) -> bool:
        """Also where every device's process has died: work goes on once one of them is there again."""
        devices = self._devices.values()
        if self._again or any(device.task is not None for device in devices):
            return True
        none_there = bool(devices) and all(device.arrival is not None for device in devices)
        return none_there and not self._run.out_of_time("surrogate")

    def speed(self, device: int, kind: str) -> float | None:
        return self._speeds.get((device, kind))

    def machine(self, device: int) -> str:
        return self._devices[device].machine

    def cores(self, device: int) -> int:
        return self._devices[device].cores

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]]) -> Mapping[str, Widths]:
        found: Mapping[str, Widths] = ray.get(self._devices[device].actor.plan.remote(kinds))
        return found

    def start(self, device: int, task: GroupTask) -> None:
        at = self._devices[device]
        sources = {key: self._run.store.load(key) for key in task.sources}
        trained = {n for source in sources.values() for part in source["parts"] for n in part["members"]}
        given = self._given(trained | set(task.members), sources, "surrogate")
        at.task, at.future = task, at.actor.train_groups.remote(task, given)

    def _given(self, numbers: Iterable[int], checkpoints: Mapping[str, Mapping[str, Any]], stage: Stage) -> Given:
        trials = {number: self._run.trials[number] for number in numbers}
        return Given(trials, checkpoints, self._run.seconds_left(stage))

    def finished(self) -> list[Finished]:
        """Groups that are done; after half a second without any, none."""
        for number, device in self._devices.items():
            if self._again and device.task is None and device.arrival is None:
                self.start(number, self._again.pop(0))
        futures = {device.future or device.arrival: d for d, device in self._devices.items()}
        futures.pop(None, None)
        ready, _ = ray.wait(list(futures), num_returns=1, timeout=_LOOK_S)
        return [finished for future in ready for finished in self._take(futures[future])]

    def _take(self, number: int) -> list[Finished]:
        device = self._devices[number]
        task = device.task
        try:
            if task is None:
                self._greet(device)
                return []
            outcome, seconds = ray.get(device.future)
        except ray.exceptions.RayActorError as death:
            self._devices[number] = self._opened()
            return self._retried(task, death) if task is not None else []
        device.task = device.future = None
        epochs = len(task.members) * (task.span.stop - task.span.start)
        self._speeds |= {(number, group.kind): epochs / max(seconds, 1e-9) for group in task.groups}
        self._run.progress.advance(epochs)
        return [Finished(task, outcome, seconds)]

    def _retried(self, task: GroupTask, death: Exception) -> list[Finished]:
        """Have a group trained again whose process died; a trial that is alone in it fails at last."""
        members = task.members
        self._deaths[task.key] += 1
        if self._deaths[task.key] < DEATHS:
            self._again.append(task)
        elif len(members) > 1:
            for part in task.smaller():
                key = group_key(part.span, part.members)
                self._deaths[key] = 0
                self._again.append(replace(part, key=key))
        else:
            told = told_of_deaths(str(death))
            return [Finished(task, GroupOutcome([], {members[0]: []}, {members[0]: told}), 0.0)]
        return []

    def train_each(self, tasks: Iterable[TargetTask]) -> Iterator[TargetOutcome]:
        """Train full-size models on the first device, as many at a time as train beside each other there."""
        self._meet()
        run, device = self._run, next(iter(self._devices.values()))
        tasks = iter(tasks)
        while together := list(islice(tasks, device.cores)):
            sources = {task.source: run.store.load(task.source) for task in together if task.source is not None}
            given = self._given([task.number for task in together], sources, "target")
            try:
                outcomes = ray.get(device.actor.train_targets.remote(together, given))
            except ray.exceptions.RayActorError:
                outcomes = [TargetOutcome(task, None, [], traceback.format_exc(), 0.0) for task in together]
            for outcome in outcomes:
                run.progress.advance(len(outcome.history))
                yield outcome

    def retire(self, device: int) -> None:
        """Give an idle device back to the cluster."""
        ray.kill(self._devices.pop(device).actor)

    def retire_all(self) -> None:
        """Give all devices back to the cluster."""
        for device in list(self._devices):
            self.retire(device)
