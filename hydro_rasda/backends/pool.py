"""A pool of devices with processes of their own, independent of how these are started and sent their work."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Finished, Outcome, Task, Widths
from hydro_rasda.processes.forks import RelayedWarnings
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.run.record_full_size import hear
from hydro_rasda.run.state import Run
from hydro_rasda.training.device_process import Given
from hydro_rasda.training.group_training import Load
from hydro_rasda.training.retry_policy import DEATHS, Deaths


class DeviceDied(Exception):
    """The process of a device ended without an answer. The message says what ended it."""


class Answer(Protocol):
    """An answer that a device's process will give."""

    def result(self) -> Any:
        """Wait for the answer; raise DeviceDied if there will be none."""
        ...


class DeviceProcess(Protocol):
    """A process that holds a `Trainer` and does one thing after another."""

    def ask(self, method: str, *arguments: Any) -> Answer:
        """Let the process call a method of its trainer. This returns at once."""
        ...

    def end(self) -> None:
        """End the process, whatever it is doing."""
        ...


LOOK_S = 0.5
"""Seconds that `finished` waits before its caller can look at the clock."""

ARRIVAL_S = 60.0
"""If no further device arrives for this number of seconds, the pool begins without the missing ones."""


@dataclass
class _OpenDevice:
    process: DeviceProcess
    answer: Answer | None
    """The answer that its work will give; None if it is idle."""
    work: Sequence[Task] = ()
    """The tasks that it trains; none while a new process is to describe itself."""
    machine: str = ""
    cores: int = 1
    node: str = ""
    """The node of the device, if a backend has several."""
    heard: float = 0.0
    """The time at which its work began, or of the last message about it."""

    @property
    def arrives(self) -> bool:
        return self.answer is not None and not self.work


class DevicePool:
    """Train on a number of devices, each with a process of its own; see `Devices`.

    If a device's process dies or hangs, it is replaced, and its work goes to any free device.
    """

    def __init__(self, run: Run, count: int) -> None:
        self._run, self._count = run, count
        self._devices: dict[int, _OpenDevice] = {}
        self._speeds: dict[tuple[int, str], float] = {}
        self._done: list[Finished] = []
        self._given: dict[int, list[Task]] = {}  # tasks to train at the same time, which have not begun
        self._next: list[Task] = []  # tasks to begin first: their process died, or they wait for several devices
        self._deaths = Deaths()
        # One for each kind of groups: another kind may rightly take a thousand times as long.
        self._paces: dict[str, HangDetector] = {}
        self._never_came = 0
        self._met = False
        self._late: set[int] = set()  # devices that had not arrived when the pool began, and have not since
        self._warnings = RelayedWarnings()

    def _process(self, device: int) -> DeviceProcess:
        """Start a device's process. This returns at once."""
        raise NotImplementedError

    def _ready(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Return the answers that have arrived; wait at most `LOOK_S` for the first one."""
        raise NotImplementedError

    def _load(self, keys: Iterable[str]) -> Load:
        """Return a function that loads these checkpoints in a device's process."""
        raise NotImplementedError

    def _capacity(self) -> int:
        """Return the number of devices, including those whose process is being replaced."""
        return max(1, self._count - len(self._late))

    def _is_lost(self, device: int) -> bool:
        """Return whether a device's process died because its machine was lost, not because of its work."""
        return False

    def begin(self) -> None:
        """Start all processes now, before they are asked for. This returns at once."""
        self._devices = {device: self._opened(device) for device in range(self._count)}

    def _opened(self, device: int) -> _OpenDevice:
        process = self._process(device)
        return _OpenDevice(process, process.ask("describe"))

    def _meet(self) -> None:
        """Wait once until all devices have arrived, or no more come: otherwise the first device would take all work."""
        if self._met:
            return
        self._met = True
        if not self._devices:
            self.begin()
        came, told = time.monotonic(), -1
        while (there := sum(not device.arrives for device in self._devices.values())) < (count := self._capacity()):
            self._take_ready()
            came = max(came, *(device.heard for device in self._devices.values()))
            if time.monotonic() - came <= ARRIVAL_S:
                continue
            if there != told:
                self._run.say(f"{there} of {count} devices have come. Other jobs may use the rest, which joins later.")
                told = there
            if there or self._run.out_of_time("race"):
                self._late = {number for number, device in self._devices.items() if device.arrives}
                return

    def idle(self, task: Task | None = None) -> Sequence[int]:
        self._meet()
        if self._next:
            return []
        more = [number for number, given in self._given.items() if len(given) < self._most(number, task)]
        return more + self._free()

    def _free(self) -> list[int]:
        """Return the devices that are idle, have no task, and are reserved for none."""
        return [d for d, device in self._devices.items() if device.answer is None and d not in self._given]

    def _most(self, number: int, task: Task | None) -> int:
        """Return how many tasks a device trains at the same time: its share of those on their way to a milestone."""
        if task is None or not task.is_full_size:
            return 1
        return min(self._devices[number].cores, -(-task.beside // self._capacity()))

    def busy(self) -> bool:
        """Return True also if every device's process has died: the work continues once one is back, if time is left."""
        if self._none_is_there():
            return bool(self._done) or not self._run.out_of_time("race")
        return bool(self._given or self._next or self._done or any(device.work for device in self._devices.values()))

    def _none_is_there(self) -> bool:
        devices = self._devices.values()
        return self._met and bool(devices) and all(device.arrives for device in devices)

    def speed(self, device: int, kind: str) -> float | None:
        return self._speeds.get((device, kind))

    def machine(self, device: int) -> str:
        return self._devices[device].machine

    def cores(self, device: int) -> int:
        return self._devices[device].cores

    def plan(
        self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None
    ) -> Mapping[str, Widths]:
        try:
            answer = self._devices[device].process.ask("plan", kinds, self._run.seconds_left("sweep"), width)
            found: Mapping[str, Widths] = self._in_time(answer)
        except DeviceDied:
            lost = self._is_lost(device)
            self._replace(device)
            # If the process died while it measured groups, its trials train one by one.
            return {} if lost else dict.fromkeys(kinds, Widths(1, assumed=True))
        return found

    def _in_time(self, answer: Answer) -> Any:
        """Return the measurements of a device; raise DeviceDied if it died or hangs."""
        pace = HangDetector("nothing was measured", foreseen=self._run.problem.epoch_seconds)
        until = time.monotonic() + pace.patience
        while answer not in self._ready([answer]):
            if time.monotonic() > until:
                raise DeviceDied(pace.told)
        return answer.result()

    def start(self, device: int, task: Task) -> None:
        given = self._given.setdefault(device, [])
        given.append(task)
        if len(given) >= self._most(device, task):
            self._train(device, self._given.pop(device))

    def _train(self, number: int, tasks: Sequence[Task]) -> None:
        device = self._devices[number]
        device.heard = time.monotonic()
        device.work, device.answer = tasks, device.process.ask("train", tasks, self._what_is_given(tasks))

    def _what_is_given(self, tasks: Sequence[Task]) -> Given:
        run, sources = self._run, [key for task in tasks for key in task.sources]
        units = run.store.units()
        # To read the checkpoint of a group, the trials of all its members are needed.
        there = {number for key in sources for number in units[key].value.get("members", ())}
        numbers = there.union(*(task.members for task in tasks))
        trials = {number: run.history.trials[number] for number in numbers}
        return Given(trials, self._load(sources), run.seconds_left(tasks[0].heat), self._capacity())

    def finished(self) -> Sequence[Finished]:
        """Return the tasks that are done; an empty list if none ends within half a second."""
        while self._given:
            self._train(*self._given.popitem())
        if not self._done:
            self._take_ready()
            while self._next and self._began(self._next[0]):
                del self._next[0]
        done, self._done = self._done, []
        return done

    def _began(self, task: Task) -> bool:
        """Begin the next task on a free device; return False if it has to wait."""
        for number in self._free():
            self._train(number, [task])
            return True
        return False

    def _take_ready(self) -> None:
        under_way = {device.answer: d for d, device in self._devices.items() if device.answer is not None}
        for answer in self._ready(list(under_way)):
            self._take(under_way[answer], answer)
        for number, device in list(self._devices.items()):
            pace = self._pace(device)
            if pace is not None and time.monotonic() - device.heard > pace.patience:
                self._give_up(number, pace.told)

    def _give_up(self, number: int, how: str) -> None:
        work = self._devices[number].work
        self._replace(number)
        self._lose(work, how)

    def _pace(self, device: _OpenDevice) -> HangDetector | None:
        if not device.work:
            return None
        task = device.work[0]
        name = " ".join(sorted({group.kind for group in task.groups}))
        if name not in self._paces:
            foreseen = self._run.problem.first_epoch_seconds(task.heat)
            self._paces[name] = HangDetector("no epoch was over", foreseen=foreseen)
        return self._paces[name]

    def _hear(self, number: int, kind: str, content: Any) -> None:
        """Take in a message of a device that trains: "notified" for epochs, otherwise warnings."""
        if kind == "notified":
            self._heard(number)
            hear(self._run, *content)
        else:
            self._warnings.give(content)

    def _heard(self, number: int) -> None:
        device, now = self._devices[number], time.monotonic()
        if (pace := self._pace(device)) is not None:
            pace.took(now - device.heard)
        device.heard = now

    def _take(self, number: int, answer: Answer) -> None:
        device = self._devices[number]
        work = device.work
        try:
            result = answer.result()
        except DeviceDied as death:
            lost = self._is_lost(number)
            self._replace(number)
            self._lose(work, str(death), lost)
            return
        self._heard(number)
        device.answer, device.work = None, ()
        if not work:
            (device.machine, device.cores, device.node), self._never_came = result, 0
            self._late.discard(number)
            return
        for finished in result:
            task, seconds = finished.task, max(finished.outcome.seconds, 1e-9)
            epochs = len(task.members) * (task.span.stop - task.span.start)
            self._speeds |= {(number, group.kind): epochs / seconds for group in task.groups}
            self._done.append(replace(finished, device=number))

    def _replace(self, number: int) -> None:
        self._devices[number].process.end()
        self._devices[number] = self._opened(number)

    def _lose(self, work: Sequence[Task], how: str, lost: bool = False) -> None:
        """Requeue or fail the work of a process that died, even if it had none yet.

        If the process was `lost` with its machine, its death does not count against its work.
        """
        if not work and not lost:
            self._never_came += 1
            if self._never_came >= DEATHS * self._count:
                raise RuntimeError(f"the process of a device did not start:\n{how}")
        again = list[Task]()
        for task in work:
            following = [task] if lost else self._deaths.of(task, how)
            if isinstance(following, Outcome):
                self._done.append(Finished(task, following))
            else:
                again += following
        self._next = again + self._next

    def close(self) -> None:
        while self._devices:
            _, device = self._devices.popitem()
            device.process.end()
