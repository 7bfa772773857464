"""The tuner's side, `tune(backend=BubbleBackend(source))`: the bubbles of all hosts together are one device."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import cloudpickle
import torch

from hydro_rasda.backends.process_pool import PROBLEM, loaded, write_shared
from hydro_rasda.bubbles.partial_units import GroupWork, TargetWork
from hydro_rasda.bubbles.rendezvous import Rendezvous, hang_up
from hydro_rasda.common.argument_checks import check_folder, check_int, check_number, require
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Devices, Finished, Task, Widths
from hydro_rasda.processes.child_count import can_be_shared
from hydro_rasda.processes.forks import RelayedWarnings, ending, receive
from hydro_rasda.run.record_full_size import hear
from hydro_rasda.run.state import Run
from hydro_rasda.settings.config import Graph, check_steps
from hydro_rasda.training.device import DeviceTrainer, Given
from hydro_rasda.training.group_training import joined
from hydro_rasda.training.retry_policy import Deaths


class BubbleBackend:
    """Trains in the bubbles of hosts; see `hydro_rasda.bubbles`.

    To the sweep, all hosts together are one device with `groups` cores. The number of hosts changes neither which
    trials train together nor which trials continue. The result is that of the same sweep on this machine alone, to the
    last digit, under two conditions. First, that sweep calls `torch.set_num_threads(groups)`. Second, its fused groups
    have the same width (by `sweep.fusion`, or by widths that were measured on this machine recently).

    Hosts may come and go before, during and after `tune`. While there is no host, `tune` waits within its time budget.
    If a host ends during a training, the training resumes from its last checkpoint in another bubble.

    The user's own training loop (`train`) works here, too, unless guests run with `preempt=False`, as on GPUs.

    Args:
        source: A folder that the tuner and the hosts both see. They must all see the run's folder, too.
        groups: The number of groups, or full-size models, that train at the same time, for example one for each rank.
        checkpoint_s: Seconds of wall time after which a guest writes a checkpoint, at the end of the current epoch.
            Each checkpoint takes time.
        loader_workers: As for `LocalBackend`.
        graph: As for `LocalBackend`.

    Raises:
        ValueError: if an argument is invalid.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        source: str | Path,
        groups: int = 2,
        checkpoint_s: float = 120.0,
        loader_workers: int | None = None,
        graph: Graph = "auto",
    ) -> None:
        check_int("groups", groups, at_least=1)
        check_number("checkpoint_s", checkpoint_s)
        check_steps(graph, loader_workers)
        self.loader_workers, self.graph = loader_workers, graph
        self._source, self._groups, self._checkpoint_s = check_folder("source", source), groups, checkpoint_s

    @contextlib.contextmanager
    def open(self, run: Run) -> Iterator[Devices]:
        rule = "anything but a `BubbleBackend` for what holds an open file or a connection, which no other process has"
        require(can_be_shared(run.problem), "backend", self, rule)
        shared = run.store.path / PROBLEM
        try:
            write_shared(shared, run.problem)
            with contextlib.closing(BubbleDevices(run, self._source, shared, self._groups, self._checkpoint_s)) as all_:
                yield all_
        finally:
            shared.unlink(missing_ok=True)


LOOK_S = 0.5
"""Seconds that `finished` waits before it returns, so that its caller can check the time budget."""

ARRIVAL_S = 60.0
"""Hosts have this number of seconds to arrive, even if the time budget ends earlier."""


@dataclass(frozen=True, eq=False)
class _GuestTask:
    """A piece: the task of one guest, to train some or all members of `work` from their last epoch to its end."""

    work: GroupWork | TargetWork
    task: Task


@dataclass(frozen=True, eq=False)
class _UnderWay:
    """A task in training; each of its `works` trains on one core."""

    task: Task
    works: Sequence[GroupWork | TargetWork]
    began: float

    def finished(self) -> Finished | None:
        """Return the task and its outcome, cut down to the trials that began; None if no trial began in time."""
        task, outcome = self.task, joined(work.outcome for work in self.works)
        begun = [number for number in task.members if number in outcome.history]
        if not begun:
            return None
        if not task.is_full_size:
            outcome.seconds = time.monotonic() - self.began
        if len(begun) < len(task.members):
            of_each = [(group, [number for number in group.members if number in begun]) for group in task.groups]
            groups = tuple(group.of(members) for group, members in of_each if members)
            task = task.of(*groups)
        return Finished(task, outcome)


@dataclass(eq=False)
class _Visitor:
    """A connected guest, and the piece that it trains; None while it is idle."""

    name: str
    piece: _GuestTask | None = None


class BubbleDevices:
    """Gives each guest a piece to train, a group or a full-size model. If the guest leaves, another one goes on."""

    def __init__(self, run: Run, source: Path, problem: Path, groups: int, checkpoint_s: float) -> None:
        self._run, self._source, self._problem = run, source, problem
        self._groups, self._checkpoint_s = groups, checkpoint_s
        self._device = DeviceTrainer(run.problem)
        self._device.cores = groups
        self._under_way: list[_UnderWay] = []
        self._waiting: deque[_GuestTask] = deque()
        self._visitors: dict[Connection, _Visitor] = {}
        self._heard: SimpleQueue[tuple[Connection, str, Any]] = SimpleQueue()
        self._met: set[Connection] = set()
        self._closed = False
        self._lost: dict[str, _GuestTask] = {}
        self._died_of: dict[_GuestTask, str] = {}
        self._deaths = Deaths()
        self._over: list[str] = []
        self._warnings = RelayedWarnings()
        self._told, self._opened = False, time.monotonic()
        self._door = Rendezvous(source, self._listen)

    def idle(self, task: Task | None = None) -> Sequence[int]:
        """Return the number of the only device if a task can start; otherwise an empty list.

        A full-size model can start beside other full-size models while cores are free. Any other task starts only if
        nothing is in training. No task can start if its training would be given up (see `_in_vain`).
        """
        beside = task is not None and task.is_full_size and all(of.task.is_full_size for of in self._under_way)
        full = len(self._under_way) >= (self._groups if beside else 1)
        return [] if full or self._in_vain("sweep" if task is None else task.heat) else [0]

    def busy(self) -> bool:
        return bool(self._under_way)

    def _in_vain(self, heat: HeatName) -> bool:
        """Return whether training must be given up, because the heat's time is spent and no guest is there.

        Hosts have `ARRIVAL_S` to arrive in any case. If a guest is there, it still trains one epoch of each piece.
        """
        had_time = time.monotonic() - self._opened > ARRIVAL_S
        return not self._visitors and had_time and self._run.out_of_time(heat)

    def speed(self, device: int, kind: str) -> None:
        """Return None: no speed is measured, because there is no other device to compare with."""

    def machine(self, device: int) -> str:
        return self._device.machine

    def cores(self, device: int) -> int:
        return self._groups

    def plan(
        self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None
    ) -> Mapping[str, Widths]:
        """Measure widths of fused groups on the tuner's machine: guests are often stopped, which hides their speed."""
        return self._device.plan(kinds, self._run.seconds_left("sweep"), width)

    def start(self, device: int, task: Task) -> None:
        self._forget()
        if task.is_full_size:
            works: list[GroupWork | TargetWork] = [TargetWork(self._run, task, max(1, self._groups // task.beside))]
        else:
            parts = task.apart() if self._run.problem.is_own(task.heat) else task.parts()
            threads = max(1, self._groups // len(parts))  # as many as `DeviceTrainer` uses if memory suffices
            works = [GroupWork(self._run, part, threads) for part in parts]
        self._under_way.append(_UnderWay(task, works, time.monotonic()))
        for work in works:
            self._put(work, work.begin())

    def finished(self) -> Sequence[Finished]:
        """Return the tasks whose parts are all done; an empty list if no task is done within `LOOK_S`."""
        self._forget()
        self._go_on()
        done = [of for of in self._under_way if all(work.done for work in of.works)]
        self._under_way = [of for of in self._under_way if of not in done]
        self._over += [key for of in done for work in of.works for key in work.saved]
        return [finished for of in done if (finished := of.finished()) is not None]

    def close(self) -> None:
        """Disconnect all guests. This ends them, because nobody waits for their training any more."""
        self._door.close()
        self._forget()
        self._closed = True
        for connection in list(self._met):
            hang_up(connection)

    def _forget(self) -> None:
        self._run.store.discard(self._over)
        self._over = []

    def _put(self, work: GroupWork | TargetWork, tasks: Iterable[Task]) -> None:
        self._waiting.extend(_GuestTask(work, task) for task in tasks)

    def _go_on(self) -> None:
        """Hand waiting pieces to idle guests, and handle guests' messages; wait at most `LOOK_S` for a message."""
        self._hand_out()
        if not self._visitors and not self._told:
            self._run.say(f"waiting for hosts: none has come to {self._source} yet, or all have left")
        self._told = not self._visitors
        with contextlib.suppress(Empty):
            self._hear(*self._heard.get(timeout=LOOK_S))
            while True:
                self._hear(*self._heard.get_nowait())
        self._hand_out()
        while self._waiting and self._in_vain(self._waiting[0].task.heat):
            piece = self._waiting.popleft()
            piece.work.give_up(piece.task)

    def _hand_out(self) -> None:
        for connection, visitor in self._visitors.items():
            while self._waiting and self._waiting[0] in self._died_of:
                piece = self._waiting.popleft()
                tasks = piece.work.died(piece.task, self._died_of.pop(piece), self._deaths)
                self._waiting.extendleft(_GuestTask(piece.work, task) for task in reversed(tasks))
            if self._waiting and visitor.piece is None:
                visitor.piece = piece = self._waiting.popleft()
                self._send(connection, "train_piece", piece.task, self._given(piece.task), piece.work.threads)

    def _given(self, task: Task) -> Given:
        run = self._run
        load = partial(loaded, {key: run.store.file(key) for key in task.sources})
        seconds = max(0.0, min(self._checkpoint_s, run.seconds_left(task.heat)))
        return Given({number: run.history.trials[number] for number in task.members}, load, seconds)

    def _send(self, connection: Connection, *words: Any) -> None:
        with contextlib.suppress(OSError):  # the guest has ended; its thread in `_listen` notices
            connection.send_bytes(cloudpickle.dumps(words))

    def _listen(self, connection: Connection) -> None:
        """Queue the messages of one guest, in a separate thread, because a guest may be stopped within a message."""
        self._met.add(connection)
        if self._closed:  # the guest came while the sweep ended
            hang_up(connection)
        try:
            self._heard.put((connection, "came", json.loads(connection.recv_bytes())))
            kind = ""
        except (EOFError, OSError):
            kind = "died"
        while kind != "died":
            kind, content = receive(connection)
            self._heard.put((connection, kind, content))
        self._met.remove(connection)

    def _hear(self, connection: Connection, kind: str, content: Any) -> None:
        if kind == "came":
            self._visitors[connection] = _Visitor(content["name"])
            self._send(connection, "open", self._problem)
            self._learn_of_death(*content["before"])
            return
        visitor = self._visitors[connection]
        if kind == "notified":
            hear(self._run, *content)
        elif kind == "warned":
            self._warnings.give(content)
        elif kind == "raised":
            raise RuntimeError(f"a guest cannot go on:\n{content}")
        elif kind == "died":
            del self._visitors[connection]
            connection.close()
            if visitor.piece is not None:
                self._waiting.appendleft(visitor.piece)
                self._lost[visitor.name] = visitor.piece
        elif visitor.piece is not None:
            work, task = visitor.piece.work, visitor.piece.task
            visitor.piece = None
            self._put(work, work.took(task, content, not self._run.out_of_time(task.heat)))

    def _learn_of_death(self, name: str, status: int) -> None:
        """Learn from a host how its guest `name` ended, because the piece that the guest trained may have killed it.

        If a host is killed with its guest, no such message comes, and the death counts against no trial.
        """
        if (piece := self._lost.pop(name, None)) is not None:
            self._died_of[piece] = ending(-status if status < 0 else status << 8)
