"""A pool of devices, each with a process of its own. Subclasses start the processes and pass messages to them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from hydro_rasda.backends.worker_numbers import WorkerNumbers, nearest
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Finished, Outcome, Task, Widths
from hydro_rasda.data import Shard
from hydro_rasda.processes.forks import RelayedWarnings
from hydro_rasda.processes.hang_detector import HangDetector, waited_in_vain
from hydro_rasda.run.record_full_size import hear
from hydro_rasda.run.state import Run
from hydro_rasda.training.device import Given
from hydro_rasda.training.full_size import RankPlace
from hydro_rasda.training.group_training import Load
from hydro_rasda.training.retry_policy import DEATHS, Deaths


class DeviceDied(Exception):
    """The process of a device ended without an answer. The message says what ended it."""


class Answer(Protocol):
    """The answer to a request, which a device's process will give."""

    def result(self) -> Any:
        """Wait for the answer; raise DeviceDied if there will be none."""
        ...


class DeviceProcess(Protocol):
    """A process that holds a `Trainer` and carries out one request after another."""

    def ask(self, method: str, *arguments: Any) -> Answer:
        """Let the process call a method of its trainer; return at once, before the method has returned."""
        ...

    def end(self) -> None:
        """End the process, whatever it is doing."""
        ...


LOOK_S = 0.5
"""`finished` waits at most this number of seconds, so that its caller can check the time."""

ARRIVAL_S = 60.0
"""If no further device arrives for this number of seconds, the pool begins without the missing ones."""

_LAST_WORDS_S = 3.0
"""After one rank has failed, the other ranks have this number of seconds to report what happened."""

_Ending = Sequence[Finished] | str
"""The tasks that a device has finished, or a text that says what ended its process."""


@dataclass
class _Work:
    """Tasks that train on one device, or one full-size trial that trains on several devices.

    Attributes:
        devices: The numbers of the devices. If there are several, their order is that of the ranks.
        meeting: The address at which several ranks find each other.
        endings: Maps each device that is done to its ending.
        lost: True if the machine of one of the devices was lost.
    """

    tasks: Sequence[Task]
    devices: Sequence[int]
    meeting: Any = None
    endings: dict[int, _Ending] = field(default_factory=dict)
    lost: bool = False

    @property
    def failed(self) -> bool:
        """True if a process has died, or if one of several ranks has raised an error, so that others wait for it."""
        for ending in self.endings.values():
            if isinstance(ending, str) or (len(self.devices) > 1 and any(of.outcome.error for of in ending)):
                return True
        return False

    @property
    def over(self) -> bool:
        return self.failed or len(self.endings) == len(self.devices)


@dataclass
class _OpenDevice:
    process: DeviceProcess
    answer: Answer | None
    """The answer that its work will give; None if it is idle."""
    work: _Work | None = None
    """The work that it trains; None if it is idle, or if its new process has not described itself yet."""
    machine: str = ""
    cores: int = 1
    node: str = ""
    """The node of the device, if a backend has several."""
    heard: float = 0.0
    """The time of the last message about its work; before the first message, the time at which the work began."""

    @property
    def arrives(self) -> bool:
        return self.answer is not None and self.work is None


class DevicePool:
    """Train on a number of devices, each with a process of its own; see `Devices`.

    If a device's process dies or hangs, it is replaced, and its work goes to any free device.

    Full-size trials train on `race.workers` devices each, and survivors of a milestone on more; each device's process
    is then a rank of DDP or FSDP. A trial begins once enough devices are free for it. It never gets more devices than
    the pool has. If the process of one rank dies or raises, all ranks of the trial end and are replaced together. If
    one worker is asked for, or there is one device, each device trains whole trials. Ranks communicate by `through`;
    "nccl" requires that each rank has its own GPU. For `grows`, see `WorkerNumbers`.
    """

    def __init__(self, run: Run, count: int, through: Literal["gloo", "nccl"], grows: bool = False) -> None:
        self._run, self._count, self._through = run, count, through
        self._workers = WorkerNumbers(run, grows)
        self._under_way: list[_Work] = []
        self._devices: dict[int, _OpenDevice] = {}
        self._speeds: dict[tuple[int, str], float] = {}
        self._done: list[Finished] = []
        self._given: dict[int, list[Task]] = {}  # tasks that a device will train at the same time
        self._next: list[Task] = []  # tasks that begin before others: their process died, or they wait for devices
        self._deaths = Deaths()
        # One hang detector for each kind of groups, because groups of another kind may take a thousand times as long.
        self._paces: dict[str, HangDetector] = {}
        self._never_came = 0
        self._met = False
        self._late: set[int] = set()  # devices that had not arrived when the pool began, and have not since then
        self._warnings = RelayedWarnings()

    def _process(self, device: int) -> DeviceProcess:
        """Start a device's process, and return without waiting for it."""
        raise NotImplementedError

    def _ready(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Return the answers that have arrived; wait at most `LOOK_S` for the first one."""
        raise NotImplementedError

    def _load(self, keys: Iterable[str]) -> Load:
        """Return a function that loads these checkpoints in a device's process."""
        raise NotImplementedError

    def _meeting(self, devices: Sequence[int]) -> Any:
        """Return the address at which the ranks on these devices find each other; see `Trainer.train_rank`."""
        raise NotImplementedError

    def _end_meeting(self, meeting: Any) -> None:
        """End a meeting that the ranks no longer need."""

    def _capacity(self) -> int:
        """Return the number of devices. Late devices do not count; devices whose process is being replaced do."""
        return max(1, self._count - len(self._late))

    def _is_lost(self, device: int) -> bool:
        """Return whether a device's process died because its machine was lost, not because of its work."""
        return False

    def begin(self) -> None:
        """Start all processes now, before the first task needs them, and return without waiting for them."""
        self._devices = {device: self._opened(device) for device in range(self._count)}

    def _opened(self, device: int) -> _OpenDevice:
        process = self._process(device)
        return _OpenDevice(process, process.ask("describe"))

    def _meet(self) -> None:
        """Wait once until all devices have arrived, or no more come, so that the first one does not take all work."""
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
        """Return the devices that are idle, have no task and are not reserved."""
        held = {number for work in self._under_way for number in work.devices}.union(self._given)
        return [number for number, device in self._devices.items() if device.answer is None and number not in held]

    def _has_ranks(self, task: Task) -> bool:
        """Return whether a task's full-size trial trains on ranks (perhaps only one), not as a whole on one device."""
        return task.is_full_size and self._workers.asked and self._capacity() > 1

    def _most(self, number: int, task: Task | None) -> int:
        """Return how many tasks a device trains at the same time: its share of the tasks with the same milestone."""
        if task is None or not task.is_full_size or self._has_ranks(task):
            return 1
        return min(self._devices[number].cores, -(-task.beside // self._capacity()))

    def busy(self) -> bool:
        """Return True also if all processes have died and time is left, because work continues once one is back."""
        if self._none_is_there():
            return bool(self._done) or not self._run.out_of_time("race")
        return bool(self._given or self._next or self._done or self._under_way)

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
            # If the process died or hung while it measured groups, let its trials train one by one.
            return {} if lost else dict.fromkeys(kinds, Widths(1, assumed=True))
        return found

    def _in_time(self, answer: Answer) -> Any:
        """Wait for a device's measurements, and return them; raise DeviceDied if its process died or hangs."""
        pace = HangDetector("nothing was measured", foreseen=self._run.problem.epoch_seconds)
        until = time.monotonic() + pace.patience
        while answer not in self._ready([answer]):
            if time.monotonic() > until:
                raise DeviceDied(pace.told)
        return answer.result()

    def start(self, device: int, task: Task) -> None:
        if self._has_ranks(task):
            if not self._began(task):
                self._next.append(task)
            return
        given = self._given.setdefault(device, [])
        given.append(task)
        if len(given) >= self._most(device, task):
            self._begin(self._given.pop(device), [device])

    def _began(self, task: Task) -> bool:
        """Begin a task on free devices; return False if it has to wait for them."""
        free, ranks = self._free(), self._has_ranks(task)
        size = self._workers.of(task, self._capacity()) if ranks else 1
        if size > len(free):
            return False
        nodes = {number: self._devices[number].node for number in free}
        self._begin([task], nearest(nodes, size) if ranks else free[:1], ranks)
        return True

    def _begin(self, tasks: Sequence[Task], devices: Sequence[int], ranks: bool = False) -> None:
        work, given = _Work(tasks, devices), self._what_is_given(tasks)
        if len(devices) > 1:
            work.meeting = self._meeting(devices)
        self._under_way.append(work)
        places = self._places(tasks[0], len(devices)) if ranks else [None]
        for number, place in zip(devices, places, strict=True):
            device = self._devices[number]
            device.work, device.heard = work, time.monotonic()
            if place is None:
                device.answer = device.process.ask("train", tasks, given)
            else:
                device.answer = device.process.ask("train_rank", tasks[0], given, place, work.meeting)

    def _places(self, task: Task, world: int) -> Sequence[RankPlace]:
        """Return the place of each of the `world` ranks that train a full-size trial together."""
        run, number = self._run, task.number
        before = run.store.units()[task.source].value if task.source is not None else {}
        carried = {name: before[name] for name in ("rescaled", "measured") if name in before}
        if task.span.start and run.history.metrics["race", number][-1].get("workers", world) != world:
            run.say(f"race: trial {number} goes on with {world} workers from epoch {task.span.start + 1}")
        # At least 1: with fewer workers than at first, the trial still has the global batch that was tuned.
        growth = max(1.0, world / self._workers.first)
        return [RankPlace(Shard(rank, world), growth, self._through, carried) for rank in range(world)]

    def _what_is_given(self, tasks: Sequence[Task]) -> Given:
        run, sources = self._run, [key for task in tasks for key in task.sources]
        units = run.store.units()
        # The device needs the trials of all members of a checkpoint's group to read the checkpoint.
        there = {number for key in sources for number in units[key].value.get("members", ())}
        numbers = there.union(*(task.members for task in tasks))
        trials = {number: run.history.trials[number] for number in numbers}
        return Given(trials, self._load(sources), run.seconds_left(tasks[0].heat), self._capacity())

    def finished(self) -> Sequence[Finished]:
        """Return the tasks that are done; an empty list if none ends within half a second."""
        while self._given:
            device, tasks = self._given.popitem()
            self._begin(tasks, [device])
        if not self._done:
            self._take_ready()
            while self._next and self._began(self._next[0]):
                del self._next[0]
        done, self._done = self._done, []
        return done

    def _take_ready(self) -> None:
        under_way = {device.answer: d for d, device in self._devices.items() if device.answer is not None}
        for answer in self._ready(list(under_way)):
            self._take(under_way[answer], answer)
        for number, device in list(self._devices.items()):
            pace = self._pace(device)
            if pace is not None and device.work and time.monotonic() - device.heard > pace.patience:
                device.work.endings[number] = pace.told
        for work in [work for work in self._under_way if work.over]:
            self._settle(work)

    def _pace(self, device: _OpenDevice) -> HangDetector | None:
        if device.work is None:
            return None
        task = device.work.tasks[0]
        name = " ".join(sorted({group.kind for group in task.groups}))
        if name not in self._paces:
            foreseen = self._run.problem.first_epoch_seconds(task.heat)
            self._paces[name] = HangDetector("no epoch was over", foreseen=foreseen)
        return self._paces[name]

    def _hear(self, number: int, kind: str, content: Any) -> None:
        """Handle a message of a device that trains: "notified" reports epochs, and other kinds report warnings."""
        if kind == "notified":
            self._heard(number)
            hear(self._run, *content)
        else:
            self._warnings.give(content)

    def _heard(self, number: int) -> None:
        """Note a sign of life of a device; it counts for all ranks of a trial, because they wait for each other."""
        device, now = self._devices[number], time.monotonic()
        if (pace := self._pace(device)) is not None:
            pace.took(now - device.heard)
        for other in device.work.devices if device.work else [number]:
            self._devices[other].heard = now

    def _take(self, number: int, answer: Answer) -> None:
        device = self._devices[number]
        device.answer, work = None, device.work
        try:
            result = answer.result()
        except DeviceDied as death:
            if work is None:
                self._did_not_come(number, str(death))
            else:
                work.endings[number], work.lost = str(death), work.lost or self._is_lost(number)
            return
        self._heard(number)
        if work is None:
            (device.machine, device.cores, device.node), self._never_came = result, 0
            self._late.discard(number)
        else:
            work.endings[number] = result

    def _did_not_come(self, number: int, how: str) -> None:
        """Replace a process that died before it had any work."""
        if not self._is_lost(number):
            self._never_came += 1
            if self._never_came >= DEATHS * self._count:
                raise RuntimeError(f"the process of a device did not start:\n{how}")
        self._replace(number)

    def _settle(self, work: _Work) -> None:
        """Free the devices of ended work. Record its tasks as done, or try them again if a process died or hung."""
        first = work.devices[0]
        if failed := work.failed:
            self._hear_out(work)
        self._under_way.remove(work)
        if work.meeting is not None:
            self._end_meeting(work.meeting)
        for number in work.devices:
            if failed:  # the process may be dead, or may wait for another rank that has failed
                self._replace(number)
            else:
                self._devices[number].work = None
        ending = min(work.endings.values(), key=_blame) if failed else work.endings[first]
        if work.lost or isinstance(ending, str):
            self._try_again(work.tasks, None if work.lost else str(ending))
            return
        for finished in ending:
            task, seconds = finished.task, max(finished.outcome.seconds, 1e-9)
            epochs = len(task.members) * (task.span.stop - task.span.start)
            self._speeds |= {(first, group.kind): epochs / seconds for group in task.groups}
            self._done.append(replace(finished, device=first))

    def _hear_out(self, work: _Work) -> None:
        """Wait a moment for other ranks' endings: the rank that failed first may only have waited for a dead one."""
        until = time.monotonic() + _LAST_WORDS_S
        while len(work.endings) < len(work.devices) and time.monotonic() < until:
            silent = {self._devices[number].answer: number for number in work.devices}
            for answer in self._ready([answer for answer in silent if answer is not None]):
                self._take(silent[answer], answer)

    def _replace(self, number: int) -> None:
        self._devices[number].process.end()
        self._devices[number] = self._opened(number)

    def _try_again(self, tasks: Sequence[Task], how: str | None) -> None:
        """Requeue or fail the tasks of a process that died.

        `how` says how the process died; None if it was lost with its machine, so that its death does not count against
        the tasks.
        """
        again = list[Task]()
        for task in tasks:
            following = [task] if how is None else self._deaths.of(task, how)
            if isinstance(following, Outcome):
                self._done.append(Finished(task, following))
            else:
                again += following
        self._next = again + self._next

    def close(self) -> None:
        while self._devices:
            _, device = self._devices.popitem()
            device.process.end()
        while self._under_way:
            if (meeting := self._under_way.pop().meeting) is not None:
                self._end_meeting(meeting)


def _blame(ending: _Ending) -> int:
    """Return the priority of an ending if work failed; the ending with the lowest number is reported.

    A process that died comes first, then a rank that raised an error by itself, then a rank that waited in vain.
    """
    if isinstance(ending, str):
        return 0
    errors = [finished.outcome.error for finished in ending]
    return 3 if None in errors else 2 if any(waited_in_vain(str(error)) for error in errors) else 1
