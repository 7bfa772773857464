"""This machine: by default one device in this process, or several devices with one process each."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from hydro_rasda.common.argument_checks import check_number, require
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Devices, Finished, Task, Widths
from hydro_rasda.processes.child_count import can_be_shared
from hydro_rasda.run.record_full_size import hear
from hydro_rasda.run.state import Run
from hydro_rasda.settings.config import Graph, check_steps
from hydro_rasda.training.device import DeviceShare, DeviceTrainer, Work


class LocalBackend:
    """This machine. One device trains in this process and in forks of it; several devices have one process each.

    With several devices, each trains groups of the sweep, then full-size models. As on a cluster, an idle device
    continues a trial that is already among the best at its rung. So the promoted trials can depend on the devices'
    speed. Group sizes, and so the last digits of scores, depend on the number of devices. A trial's random numbers and
    its full-size training are the same on any number of devices.

    If `race.workers` or `race.max_workers` is above 1, a full-size trial trains with DDP on several devices, as on a
    Ray cluster. After each milestone that it survives, it trains on more devices.

    Args:
        device: Devices to train on: one, or a list such as `["cuda:0", "cuda:1"]`. None for all GPUs, or the CPU if
            there are none. If a device is listed twice, it has two processes, each with half of its memory. They share
            a GPU through NVIDIA's Multi-Process Service if that is installed (as in `pack`).
        memory: Bytes of a CPU's memory for everything that trains at the same time, in addition to the tuner's own
            memory. None: 90 % of the free memory, within the cgroup's limit. Several trainings run side by side if
            measurements show that they fit.
        loader_workers: Processes that load batches of a Dataset ahead, for each model or group in training, as
            `num_workers` of a DataLoader. None: up to 4 for a GPU, none for a CPU, whose cores train models. Data that
            cannot be pickled, such as those with a connection, get none. The number does not change the batches.
        graph: If true, record training steps as CUDA graphs and replay them, with one launch per batch (see
            `fusion.GraphedStep`). This concerns fused groups, and full-size models on one worker. "auto": on CUDA.
            True: as "auto", but refused without a GPU. False: never. If a step cannot be recorded, a
            `fusion.graph.GraphWarning` names the line, and the step runs as it is written. On a CPU, "auto" compiles
            the steps of a fused group that trains for minutes to its next milestone, if that was measured to save twice
            the time of compiling. Results are the same up to rounding. A run may be resumed with another value.

    Raises:
        ValueError: for an invalid argument. `open` also raises it for several devices if the model function, the
            objective or the data hold an open file or a connection, which two processes cannot share.
    """

    def __init__(
        self,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        memory: float | None = None,
        loader_workers: int | None = None,
        graph: Graph = "auto",
    ) -> None:
        listed: Sequence[Any] = device if isinstance(device, list | tuple) else [device]
        where = default_devices() if device is None else [_checked(name) for name in listed]
        require(len(where) > 0, "device", device, "None, or one device or more")
        if memory is not None:
            check_number("memory", memory, above=0)
        check_steps(graph, loader_workers)
        if graph is True:
            rule = "'auto' or False where no device is a GPU of CUDA's"
            require(any(one.type == "cuda" for one in where), "graph", True, rule)
        self._asked, self.devices, self._memory = device, where, memory
        self.loader_workers, self.graph = loader_workers, graph

    @property
    def device(self) -> torch.device:
        """The only device. If there are several, the CPU, because the problem is sent to them from the CPU's memory."""
        return self.devices[0] if len(self.devices) == 1 else torch.device("cpu")

    @contextmanager
    def open(self, run: Run) -> Iterator[Devices]:
        devices = self.devices
        if len(devices) > 1 and not can_be_shared(run.problem):
            rule = "one device for what holds an open file or a connection, which two processes cannot share"
            require(self._asked is None, "device", self._asked, rule)
            devices = devices[:1]
        if len(devices) == 1:
            # Within this context, "cuda" in the user's code means this device.
            where = torch.cuda.device(devices[0]) if devices[0].type == "cuda" else nullcontext()
            with where, closing(LocalDevice(run, devices[0], self._memory)) as one:
                yield one
            return
        # Import it only here, because training on one device does not need it.
        from hydro_rasda.backends.process_pool import LocalProcesses

        with LocalProcesses(run, devices, self._memory) as several:
            yield several


class LocalDevice:
    """One device of this process, which trains while `finished` is called; see `Devices`."""

    def __init__(self, run: Run, device: torch.device, memory: float | None = None) -> None:
        self._run = run
        self._problem = run.problem.on(device)
        self._device = DeviceTrainer(self._problem, share=DeviceShare(memory=memory))
        self._tasks: list[Task] = []
        self._left = Counter[int]()  # the check of the transfer trains one trial in two tasks
        self._training: Generator[Finished, None, None] | None = None

    def idle(self, task: Task | None = None) -> Sequence[int]:
        beside = task is not None and all(one.is_full_size for one in (task, *self._tasks))
        # Full-size models begin together, at most one on each core. But the user's own trainings may differ in length,
        # so accept any number: each begins as soon as a core is free.
        most = 1 if not beside else math.inf if self._problem.is_own("race") else self._device.cores
        return [0] if self._training is None and len(self._tasks) < most else []

    def busy(self) -> bool:
        return bool(self._tasks)

    def speed(self, device: int, kind: str) -> None:
        """Return None, because there is no other device to compare with."""

    def machine(self, device: int) -> str:
        return self._device.machine

    def cores(self, device: int) -> int:
        return self._device.cores

    def plan(
        self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None
    ) -> Mapping[str, Widths]:
        what, seconds = f"measuring {', '.join(sorted(kinds))}", self._run.seconds_left("sweep")
        if self._device.children:
            return self._device.plan(kinds, seconds, width)
        if deaths := self._run.store.doing.suspected(what):
            told = f"{deaths} processes in a row died while they measured how many trials train fastest as one"
            again = "the same call with `resume='changed'` measures again"
            self._run.say(f"{told}: those of {len(kinds)} structures train one after another; {again}")
            return dict.fromkeys(kinds, Widths(1, assumed=True))
        with self._run.store.doing.of(what):
            return self._device.plan(kinds, seconds, width)

    def start(self, device: int, task: Task) -> None:
        self._tasks.append(task)
        self._left.update(task.members)

    def finished(self) -> Sequence[Finished]:
        """Return the next task, or part of a task, that is done; an empty list if the remaining ones will not begin."""
        if self._training is None:
            self._training = self._device.train(list(self._tasks), self._work(self._tasks[0].heat))
        finished = next(self._training, None)
        self._left -= self._left if finished is None else Counter(finished.task.members)
        if not self._left:
            next(self._training, None)  # run the generator to its end
            self._training, self._tasks = None, []
        return [] if finished is None else [finished]

    def close(self) -> None:
        """End the training that is under way, and its forked processes."""
        if self._training is not None:
            self._training.close()

    def _work(self, heat: HeatName) -> Work:
        run = self._run

        def load(key: str) -> Any:
            return run.store.load(key, self._problem.device)

        return Work(run.history.trials, load, lambda: run.out_of_time(heat), partial(hear, run), run.store.doing)


def _checked(name: object) -> torch.device:
    try:
        device = torch.device(name) if isinstance(name, (str, torch.device)) else None
    except RuntimeError:
        device = None
    gpus = torch.cuda.device_count() if device is not None and device.type == "cuda" else 0
    known = device is not None and (device.index or 0) < (1 if device.type == "cpu" else gpus)
    require(known, "device", name, "the name of a device that is there: 'cpu' or a GPU of CUDA's, such as 'cuda:0'")
    assert device is not None
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu")


def default_devices() -> list[torch.device]:
    """Return all GPUs, or the CPU if there are none; only one GPU if this system cannot start further processes."""
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    count = torch.cuda.device_count() if os.name == "posix" else 1
    return [torch.device("cuda")] if count == 1 else [torch.device("cuda", index) for index in range(count)]
