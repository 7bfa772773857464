"""Train tasks on one device: a GPU, or a CPU whose cores train at the same time.

Each core trains its own fused group of surrogates. Full-size trials share the cores. With every halving, the remaining
trials get more threads (RASDA's doubling in space, on one machine). If measurements show that models do not fit memory
together, they train one after the other. `DeviceTrainer` trains in the tuner's process. `Trainer` runs in a separate
process for each device and serves the tuner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fusion.width import keep_freed_memory
from fusion.width.memory import usable_memory
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import EpochMetrics, Finished, Outcome, Task, Widths
from hydro_rasda.data import Shard, move
from hydro_rasda.problem.dry_run_of_batches import one_thread
from hydro_rasda.problem.problem import Problem
from hydro_rasda.processes.child_count import usable_children
from hydro_rasda.processes.forks import Crowd, Died, Notify, RelayedWarnings, imap_forked
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.processes.memory_estimates import Peaks, kind_of_group, kind_of_own, kind_of_target
from hydro_rasda.processes.without_compiler import leave_out_compiler
from hydro_rasda.run.crash_log import CrashLog, training_of
from hydro_rasda.schedulers.packing_policy import Job, Room, beside
from hydro_rasda.training.distributed import Store, file_store
from hydro_rasda.training.full_size import RankPlace, told_of, train_full_size_trial, train_target_on_ranks
from hydro_rasda.training.group_training import LiveGroup, Load, joined, train_group
from hydro_rasda.training.group_widths import machine, planned_widths
from hydro_rasda.training.retry_policy import Deaths


@dataclass(frozen=True)
class Work:
    """The trials, functions and crash log that the training of every task uses.

    Attributes:
        load: Returns an earlier task's checkpoint by its key, on the device.
        should_stop: Called after each epoch. Training stops if it returns True.
        notify: Called after each epoch with the epochs to count (one for each trial of a group), the metrics, and the
            journal's entry for a full-size model (`told_of`).
        doing: The crash log of this process. It names the task that trains in this process, not in a fork.
    """

    trials: Mapping[int, Trial]
    load: Load
    should_stop: Callable[[], bool]
    notify: Notify
    doing: CrashLog = field(default_factory=CrashLog)


@dataclass(frozen=True)
class DeviceShare:
    """A process's share of a device.

    Attributes:
        processes: Number of processes that share the device equally.
        memory: Bytes for all models that train on the device at the same time, over all `processes`; None for all free
            memory of the system or the cgroup.
    """

    processes: int = 1
    memory: float | None = None


WHOLE = DeviceShare()
"""The share of a process that has the device to itself."""


class DeviceTrainer:
    """Train tasks on a device; each call returns when its tasks are done.

    Args:
        may_die: True if this process serves only this device and is replaced if it dies. A single core then trains in
            this process, not in a fork. False if this process must survive. Then tasks train in forks whenever
            processes can share the device and the data.

    Attributes:
        children: Number of processes that are forked to train at the same time; 0 if this process trains.
        cores: Number of groups, or full-size models, that train at the same time.
    """

    def __init__(self, problem: Problem, may_die: bool = False, share: DeviceShare = WHOLE) -> None:
        self._problem, self._share = problem, share
        self._live, self._relayed = LiveGroup(), RelayedWarnings()
        self._peaks: dict[HeatName, Peaks] = {}
        self._paces: dict[HeatName, HangDetector] = {}
        self.children = usable_children(problem)
        self.cores = max(1, self.children)
        if may_die and self.cores == 1:
            self.children = 0
        if problem.device.type == "cpu":
            # If freed memory went back to the system, each step would have to get new pages. Page faults can take half
            # of a fused step.
            keep_freed_memory()

    @property
    def machine(self) -> str:
        return machine(self._problem.device)

    def plan(
        self, kinds: Mapping[str, Sequence[Trial]], seconds: float = math.inf, width: float | None = None
    ) -> dict[str, Widths]:
        """Choose for each kind how many trials train as one group; `seconds` is the time left, as in `planned_widths`.

        Args:
            kinds: Maps each kind to its trials, whose models can be fused.
            width: The width ratio of a middle heat's surrogates, as in `Task`; None in the sweep.
        """
        self.forget_group()
        peaks, free, tight = self._peaks_of("sweep" if width is None else "middle", width), self.free, self._is_tight()
        problem = self._problem.at_width(width)
        with one_thread() if self.cores > 1 else nullcontext():
            found = planned_widths(problem, kinds, self.cores, self.children > 0, free, peaks, tight, seconds)
        peaks.keep(free / self.cores)
        # A share is the part of the device's memory that a kind's largest group takes. It is rounded down to 1 % of a
        # core's memory, so that measurements that differ little give equal shares.
        steps = 100 * self.cores
        taken = {kind: peaks.expected(kind_of_group(kind, kinds[kind]), widths.most) for kind, widths in found.items()}
        shares = {kind: math.floor(size / max(1.0, free) * steps) / steps for kind, size in taken.items()}
        return {kind: replace(widths, share=shares[kind]) for kind, widths in found.items()}

    def forget_group(self) -> None:
        """Free the memory of the group that trained last, before other work begins."""
        self._live.drop()

    def _is_tight(self) -> bool:
        """Tell whether memory may be too small for one full-size model on each core, by a model's expected peak."""
        return self.cores > 1 and self.cores * self._peaks_of("race").expected("of any kind") > self.free

    def _peaks_of(self, heat: HeatName, width: float | None = None) -> Peaks:
        """Return the `Peaks` that predict how much memory a heat's models take; `width` is as in `Task`."""
        if heat not in self._peaks:
            self._peaks[heat] = Peaks(self._problem.at_width(width), heat)
        return self._peaks[heat]

    def _pace_of(self, heat: HeatName) -> HangDetector:
        if heat not in self._paces:
            self._paces[heat] = HangDetector("no epoch was over", foreseen=self._problem.first_epoch_seconds(heat))
        return self._paces[heat]

    def train(self, tasks: Sequence[Task], work: Work, devices: int = 1) -> Generator[Finished, None, None]:
        """Train one task of fused groups, or several full-size models. At most `cores` of them train at the same time.

        Args:
            devices: Number of devices, this one included, that share the trials with the same milestone.

        Yields:
            Each task when it is done. The wall time of models that train at the same time is divided among them. A task
            of the user's own loop is yielded in parts, one for each trial, so that no trial waits for another. Parts
            that would train in forks are left out if they have not begun when time is over or a score is good enough.
        """
        if self._problem.is_own(tasks[0].heat):
            tasks = [part for task in tasks for part in ([task] if task.is_full_size else task.apart())]
            yield from self._train_models(tasks, work, devices)
            return
        if tasks[0].is_full_size:
            yield from self._train_models(tasks, work, devices)
            return
        (task,), started = tasks, time.perf_counter()
        outcome = self._train_groups(task, work) if self.children else self._train_part(task, work, work.notify)
        outcome.seconds = time.perf_counter() - started
        yield Finished(task, outcome)

    def _train_groups(self, task: Task, work: Work) -> Outcome:
        """Train each group of a task to its milestone in its own process; return the outcome of all groups together."""
        tasks = task.parts()
        # Retries call `forked`, too, with the same number of threads. So their results are equal to the last digit.
        forked = partial(self._forked, work=work, threads=self.cores // self._at_once(tasks, work))
        outcomes, deaths = dict(forked(tasks)), Deaths()
        return joined(self._settled(part, outcomes[i], forked, deaths) for i, part in enumerate(tasks))

    def _train_models(self, tasks: Sequence[Task], work: Work, devices: int) -> Iterator[Finished]:
        """Train full-size models, or models of the user's own loop, at the same time; yield each outcome.

        The fewer models share the device, the more threads each of them has. If `children` is 0, they train one after
        another.
        """
        self.forget_group()
        if not self.children:
            yield from (Finished(task, self._train_part(task, work, work.notify)) for task in tasks)
            return
        # The cores are divided among `lanes` models. Unless memory limits `lanes`, it does not depend on how many tasks
        # are left. So a resumed run uses the same number of threads, and its results are equal to the last digit.
        lanes, fit = -(-tasks[0].beside // devices), self._at_once(tasks, work)
        if fit < min(len(tasks), self.cores):
            lanes = min(lanes, fit)
        forked = partial(self._forked, work=work, threads=max(1, self.cores // lanes))
        died, beside = [], min(len(tasks), self.cores)
        for i, outcome in forked(tasks):
            if isinstance(outcome, Died):
                died.append((tasks[i], outcome))
            else:
                outcome.seconds /= beside
                yield Finished(tasks[i], outcome, beside=beside)
        deaths = Deaths()
        yield from (Finished(task, self._settled(task, death, forked, deaths)) for task, death in died)

    def _train_part(self, task: Task, work: Work, notify: Notify) -> Outcome:
        """Train a group, or a full-size model, in this process.

        If earlier processes died while they trained this group, the group is split. A single trial fails if a further
        process died while it trained the trial. In a fork, the crash log is always empty, so that neither happens.
        """
        what = task.key if task.is_full_size else training_of(task.members, task.span.stop)
        if len(task.members) > 1 and work.doing.suspected(what):
            outcome = joined(self._train_part(part, work, notify) for part in task.smaller())
            work.doing.forget(what)
            return outcome
        if len(task.members) == 1 and (how := work.doing.dropped(what)):
            return Outcome.failed(task.number, how, died=True)

        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            work.doing.reached(epoch)
            notify(len(task.members), metrics, told_of(task, epoch, metrics))

        told = work.should_stop, on_epoch
        with work.doing.of(what):
            if not task.is_full_size:
                return train_group(self._problem.at_width(task.width), work.trials, task, work.load, *told, self._live)
            state = work.load(task.source) if task.source is not None else None
            return train_full_size_trial(self._problem, work.trials[task.number], task, state, *told)

    def _settled(self, task: Task, outcome: Outcome | Died, forked: _Forked, deaths: Deaths) -> Outcome:
        """Return a task's outcome. A task whose process died trains again until it is done or fails.

        It then has the device to itself, and may be split into halves; see `Deaths`.
        """
        if isinstance(outcome, Outcome):
            return outcome
        following = deaths.of(task, outcome.how)
        if isinstance(following, Outcome):
            return following
        return joined(self._settled(part, dict(forked([part]))[0], forked, deaths) for part in following)

    def _forked(self, tasks: Sequence[Task], work: Work, threads: int) -> Iterator[tuple[int, Any]]:
        """Train each task in its own process, as many at a time as memory and cores allow.

        Yield each task's index in `tasks` with its outcome, or with `Died`. A task that does not begin, because `over`
        returns True, is left out. Record the memory peaks of the processes.
        """
        kinds = [self._kind(task, work) for task in tasks]
        peaks = self._peaks_of(tasks[0].heat, tasks[0].width)

        def took(i: int, peak: int) -> None:
            peaks.learn(*kinds[i], peak)

        settings, is_own, found = self._problem.settings, self._problem.is_own(tasks[0].heat), False

        def over() -> bool:
            return is_own and (found or work.should_stop())

        crowd = Crowd(self.free, self.cores, [peaks.expected(*kind) for kind in kinds], took, over)
        forked = replace(work, doing=CrashLog())
        pieces = [partial(self._train_part, task, forked) for task in tasks]
        pace = self._pace_of(tasks[0].heat)
        for i, outcome in imap_forked(pieces, threads, work.notify, pace, crowd, self._relayed):
            if is_own and isinstance(outcome, Outcome):
                scores = (last[settings.metric] for epochs in outcome.history.values() for _, last in epochs)
                found = found or any(map(settings.good_enough, scores))
            yield i, outcome
        peaks.keep(self.free / self.cores)

    def _at_once(self, tasks: Sequence[Task], work: Work) -> int:
        """Return how many of these tasks may begin at the same time, as far as memory allows."""
        peaks = self._peaks_of(tasks[0].heat, tasks[0].width)
        jobs = [Job(task.key, peaks.expected(*self._kind(task, work)), 0.0, 0.0) for task in tasks]
        return len(beside(jobs, Room("", self.free, self.cores)))

    def _kind(self, task: Task, work: Work) -> tuple[str, int]:
        """Return the key under which `Peaks` hold a task's memory: its kind, and how many models train as one."""
        if self._problem.is_own("sweep"):
            return kind_of_own(work.trials[task.number]), 1
        if task.is_full_size:
            return kind_of_target(work.trials[task.number]), 1
        (group,) = task.groups
        return kind_of_group(group.kind, [work.trials[n] for n in group.members]), len(group.members)

    @property
    def free(self) -> float:
        """The bytes that this process may use for all of its models together; infinite if they are unknown."""
        share, found = self._share, usable_memory(self._problem.device)
        left = math.inf if found is None else found
        return (left if share.memory is None else min(left, share.memory)) / share.processes


_Forked = Callable[[Sequence[Task]], Iterator[tuple[int, Any]]]
"""A function that trains tasks at the same time, each in its own process, so that a crash does not end this one."""


@dataclass(frozen=True)
class Given:
    """The data that a device's process gets with a task.

    Attributes:
        load: Returns an earlier task's checkpoint by its key, on the CPU.
        seconds: Seconds that the task may take.
        devices: Number of devices that share the full-size trials.
    """

    trials: Mapping[int, Trial]
    load: Load
    seconds: float
    devices: int = 1


class Trainer:
    """Train on one device, in its own process.

    Args:
        should_leave: Returns whether to end after the current epoch, even if there is time left.
    """

    def __init__(
        self,
        problem: Problem,
        where: torch.device,
        threads: int,
        notify: Notify = lambda *reported: None,
        should_leave: Callable[[], bool] = lambda: False,
        share: DeviceShare = WHOLE,
    ) -> None:
        torch.set_num_threads(threads)
        leave_out_compiler()
        self._where, self._notify, self._should_leave = where, notify, should_leave
        self._problem = problem.on(where)
        self._device = DeviceTrainer(self._problem, may_die=True, share=share)

    def describe(self) -> tuple[str, int, str]:
        """Return the device's `machine` and `cores`, as in `DeviceTrainer`, and its node, which is "" here."""
        return self._device.machine, self._device.cores, ""

    def plan(
        self, kinds: Mapping[str, Sequence[Trial]], seconds: float, width: float | None = None
    ) -> dict[str, Widths]:
        return self._device.plan(kinds, seconds, width)

    def train(self, tasks: Sequence[Task], given: Given) -> list[Finished]:
        """Train tasks at the same time; their checkpoints are moved to the CPU."""
        found = self._device.train(tasks, self._work(given), given.devices)
        return [replace(finished, outcome=_on_cpu(finished.outcome)) for finished in found]

    def train_rank(self, task: Task, given: Given, place: RankPlace, meeting: Any) -> list[Finished]:
        """Train a full-size trial as one of several ranks, which find each other by the file `meeting`."""
        self._device.forget_group()
        work, open_store = self._work(given), partial(self._store, place.shard, meeting)

        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            self._notify(1, metrics, told_of(task, epoch, metrics))

        # The state stays on the CPU, because under FSDP a rank's device may have memory for its part only.
        trial, state = work.trials[task.number], given.load(task.source) if task.source is not None else None
        told = work.should_stop, on_epoch
        outcome = train_target_on_ranks(self._problem, trial, task, state, place, open_store, *told)
        return [Finished(task, _on_cpu(outcome))]

    def _store(self, shard: Shard, meeting: Any) -> Store:
        """Return the store through which the ranks find each other."""
        return file_store(meeting, shard.world)

    def _work(self, given: Given) -> Work:
        deadline = time.monotonic() + given.seconds

        def load(key: str) -> Any:
            return move(given.load(key), self._where, wait=True)

        def should_stop() -> bool:
            return time.monotonic() >= deadline or self._should_leave()

        return Work(given.trials, load, should_stop, self._notify)


def _on_cpu(outcome: Outcome) -> Outcome:
    return replace(outcome, checkpoint=move(outcome.checkpoint, torch.device("cpu"), wait=True))
