"""Full-size trials on several devices of a pool, with DDP or FSDP: RASDA's doubling in space (section 3.1)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from hydro_rasda.backends.pool import Answer, DeviceDied, DevicePool
from hydro_rasda.contracts import Finished, Outcome, Task
from hydro_rasda.data import Shard
from hydro_rasda.history.full_size import trained_spans
from hydro_rasda.processes.hang_detector import waited_in_vain
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import RASDA, Growth
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.training.full_size_on_ranks import RankPlace
from hydro_rasda.training.worker_reports import SCALING_EFFICIENCY, noise_in_workers

_LAST_WORDS_S = 3.0
"""Seconds that the other ranks have to report what happened, once one rank has failed."""


@dataclass
class _Ranks:
    """The ranks that train a full-size trial. `endings` maps a rank to its outcome, or to what ended its process.

    `lost` is True if a machine has ended, and a rank with it.
    """

    task: Task
    devices: Sequence[int]
    meeting: Any
    endings: dict[int, Outcome | str] = field(default_factory=dict)
    lost: bool = False

    @property
    def failed(self) -> bool:
        return any(isinstance(ending, str) or ending.error is not None for ending in self.endings.values())

    @property
    def over(self) -> bool:
        return self.failed or len(self.endings) == len(self.devices)


class ElasticPool(DevicePool):
    """A pool that trains full-size trials on `race.workers` devices each, and survivors of a milestone on more.

    A trial begins once enough devices are free for it. It never gets more devices than the pool has. If the process of
    one rank dies or raises, all ranks of the trial end and are replaced together. If one worker is asked for, or there
    is one device, each device trains whole trials. If `race.workers` is 1 and `race.max_workers` is None, trials grow
    only if `grows` is True. Ranks communicate by `through`; "nccl" requires that each rank has its own GPU.
    """

    def __init__(self, run: Run, count: int, through: Literal["gloo", "nccl"], grows: bool = False) -> None:
        super().__init__(run, count)
        asked = run.settings.race
        self._asked = asked.workers > 1 or (grows if asked.max_workers is None else asked.max_workers > 1)
        self._rule = _rule(run.settings)
        self._through = through
        self._ranks: list[_Ranks] = []

    def _meeting(self, devices: Sequence[int]) -> Any:
        """Return the address at which the ranks on these devices find each other; see `Trainer.train_rank`."""
        raise NotImplementedError

    def _end_meeting(self, meeting: Any) -> None:
        """End a meeting that the ranks no longer need."""

    def _free(self) -> list[int]:
        held = {number for ranks in self._ranks for number in ranks.devices}
        return [number for number in super()._free() if number not in held]

    def _has_ranks(self, task: Task) -> bool:
        return task.is_full_size and self._asked and self._capacity() > 1

    def _most(self, number: int, task: Task | None) -> int:
        return 1 if task is None or self._has_ranks(task) else super()._most(number, task)

    def start(self, device: int, task: Task) -> None:
        if not self._has_ranks(task):
            super().start(device, task)
        elif not self._began(task):
            self._next.append(task)

    def _began(self, task: Task) -> bool:
        if not self._has_ranks(task):
            return super()._began(task)
        free, size = self._free(), self._size(task)
        if size > len(free):
            return False
        self._begin(task, nearest({number: self._devices[number].node for number in free}, size))
        return True

    def _size(self, task: Task) -> int:
        rule, start, capacity = self._rule, task.span.start, self._capacity()
        last = self._run.history.metrics["race", task.number][-1] if start else {}
        held = int(last.get("workers", rule.workers))
        growth = Growth(
            held=held,
            due=rule.workers_at(start),
            base=rule.workers,
            alive=task.beside,
            capacity=capacity,
            seconds={},
            free=capacity,
            sharing=task.beside,
            own=self._epoch_seconds(task.number),
            efficiency=last.get(SCALING_EFFICIENCY),
            noise_scale=noise_in_workers(last, held),
        )
        settled = rule.grow == "efficient" and start not in rule.milestones
        return min(held if settled else rule.resize(growth), capacity)

    def _epoch_seconds(self, number: int) -> dict[int, float]:
        taken = defaultdict[int, list[float]](list)
        for trial, unit in trained_spans(self._run.store.units()):
            if trial == number and unit.lines:
                taken[int(unit.lines[-1].get("workers", 1))].append(unit.seconds / len(unit.lines))
        return {workers: median(seconds) for workers, seconds in taken.items()}

    def _begin(self, task: Task, devices: Sequence[int]) -> None:
        run, number, world = self._run, task.number, len(devices)
        ranks = _Ranks(task, devices, self._meeting(devices) if world > 1 else None)
        self._ranks.append(ranks)
        given = self._what_is_given([task])
        before = run.store.units()[task.source].value if task.source is not None else {}
        carried = {name: before[name] for name in ("rescaled", "measured") if name in before}
        if task.span.start and run.history.metrics["race", number][-1].get("workers", world) != world:
            run.say(f"race: trial {number} goes on with {world} workers from epoch {task.span.start + 1}")
        # Fewer than its first workers share the batch that was tuned, as these do.
        growth = max(1.0, world / self._rule.workers)
        for rank, at in enumerate(devices):
            place = RankPlace(Shard(rank, world), growth, self._through, carried)
            device = self._devices[at]
            device.heard = time.monotonic()
            device.work = [task]
            device.answer = device.process.ask("train_rank", task, given, place, ranks.meeting)

    def _ranks_of(self, number: int) -> _Ranks | None:
        return next((ranks for ranks in self._ranks if number in ranks.devices), None)

    def _heard(self, number: int) -> None:
        """Note a sign of life of one rank for all ranks of its trial, as these wait for each other at each step."""
        super()._heard(number)
        if (ranks := self._ranks_of(number)) is not None:
            for other in ranks.devices:
                self._devices[other].heard = self._devices[number].heard

    def _give_up(self, number: int, how: str) -> None:
        ranks = self._ranks_of(number)
        if ranks is None:
            super()._give_up(number, how)
        else:
            ranks.endings[ranks.devices.index(number)] = how

    def _take(self, number: int, answer: Answer) -> None:
        ranks = self._ranks_of(number)
        if ranks is None:
            super()._take(number, answer)
            return
        self._heard(number)
        self._devices[number].answer = None
        try:
            ending = answer.result()
        except DeviceDied as death:
            ending, ranks.lost = str(death), ranks.lost or self._is_lost(number)
        ranks.endings[ranks.devices.index(number)] = ending

    def _take_ready(self) -> None:
        super()._take_ready()
        for ranks in [ranks for ranks in self._ranks if ranks.over]:
            self._settle(ranks)

    def _settle(self, ranks: _Ranks) -> None:
        """Free the devices of ranks that have ended, and record the outcome."""
        failed = ranks.failed
        if failed:
            self._hear_out(ranks)
        self._ranks.remove(ranks)
        self._end_meeting(ranks.meeting)
        raised_alone = len(ranks.devices) == 1 and not isinstance(ranks.endings[0], str)
        for number in ranks.devices:
            if failed and not raised_alone:  # the other ranks wait for one that will not come
                self._replace(number)
            else:
                self._devices[number].work = ()
        ending = _blamed(ranks.endings) if failed else ranks.endings[0]
        if ranks.lost:
            self._lose([ranks.task], "", lost=True)
        elif isinstance(ending, str):
            self._lose([ranks.task], ending)
        else:
            self._done.append(Finished(ranks.task, ending, ranks.devices[0]))

    def _hear_out(self, ranks: _Ranks) -> None:
        """Wait a moment for other ranks' endings: the rank that failed first may only have missed one that died."""
        until = time.monotonic() + _LAST_WORDS_S
        while len(ranks.endings) < len(ranks.devices) and time.monotonic() < until:
            silent = {self._devices[number].answer: number for number in ranks.devices}
            for answer in self._ready([answer for answer in silent if answer is not None]):
                self._take(silent[answer], answer)

    def close(self) -> None:
        super().close()
        for ranks in self._ranks:
            self._end_meeting(ranks.meeting)
        self._ranks.clear()


def nearest(nodes: Mapping[int, str], count: int) -> list[int]:
    """Choose `count` devices on as few nodes as possible, and of these nodes the ones with the fewest idle devices.

    >>> nodes = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "c"}
    >>> nearest(nodes, 1), nearest(nodes, 2), nearest(nodes, 4)
    ([5], [3, 4], [0, 1, 2, 3])
    """
    of_node = defaultdict[str, list[int]](list)
    for device, node in nodes.items():
        of_node[node].append(device)
    smallest_first = sorted(of_node.values(), key=len)
    whole = next((devices for devices in smallest_first if len(devices) >= count), None)
    return (whole or [device for devices in reversed(smallest_first) for device in devices])[:count]


def _rule(settings: TuneConfig) -> RASDA:
    asked = settings.race
    return RASDA(
        settings.max_t,
        settings.first_look,
        asked.reduction_factor,
        asked.scaling_factor,
        asked.workers,
        asked.max_workers,
        mode=settings.mode,
        grow=asked.grow,
        least_efficiency=asked.least_efficiency,
        batch_over_noise=asked.batch_over_noise,
    )


def _blamed(endings: dict[int, Outcome | str]) -> Outcome | str:
    """Return the ending to report if ranks failed: of one that died, otherwise of one that raised by itself."""

    def key(ending: Outcome | str) -> int:
        if isinstance(ending, str):
            return 0
        return 3 if ending.error is None else 2 if waited_in_vain(ending.error) else 1

    return min(endings.values(), key=key)
