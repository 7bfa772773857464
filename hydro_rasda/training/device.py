"""One device, as the sweep counts them: a GPU, or a CPU, whose cores train at the same time.

On several cores, each trains its own fused group of surrogates, and full-size trials share them: with every halving,
the trials that are left get more threads (RASDA's doubling in space, on one machine). What was measured not to
fit memory together trains one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fusion.width import keep_freed_memory
from fusion.width.memory import usable_memory
from hydro_rasda.contracts import EpochMetrics, FullSizeOutcome, FullSizeTask, GroupOutcome, GroupTask, Widths
from hydro_rasda.problem import Problem
from hydro_rasda.processes.child_count import usable_children
from hydro_rasda.processes.forks import Crowd, Died, Notify, imap_forked
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.processes.memory_estimates import Peaks, kind_of_group, kind_of_target
from hydro_rasda.processes.retry_policy import Deaths, ended, failure, parted
from hydro_rasda.run.crash_log import CrashLog
from hydro_rasda.run.events import Stage
from hydro_rasda.schedulers.packing_policy import Job, Room, beside
from hydro_rasda.training.full_size import train_full_size_trial
from hydro_rasda.training.fused import Load, joined, train_group
from hydro_rasda.training.group_widths import machine, planned_widths
from hydro_rasda.trial import Trial


@dataclass(frozen=True)
class Work:
    """What training needs beside a task.

    Attributes:
        load: Gives an earlier task's checkpoint by its key, on the device.
        should_stop: Asked after each epoch.
        notify: Called with how many epochs were trained, over all models that train as one, and the metrics after them.
        doing: Told what this process trains itself.
    """

    trials: Mapping[int, Trial]
    load: Load
    should_stop: Callable[[], bool]
    notify: Notify
    doing: CrashLog = field(default_factory=CrashLog)


@dataclass(frozen=True)
class Share:
    """What a process has of a device.

    Attributes:
        processes: How many share it, each with as much.
        memory: Bytes for all that trains there at the same time; None: what the system, or a cgroup, has left.
    """

    processes: int = 1
    memory: float | None = None


WHOLE = Share()
"""Of a device that one process has."""


class Device:
    """Trains what it is given; returns when that is done.

    Args:
        may_die: Whether this process is the device's own, which is replaced where it dies: a single core then trains in
            it, and not in one forked of it.
        share: What it has of the device's memory.

    Attributes:
        children: How many processes are forked to train at the same time; 0 where this one trains.
        cores: How many groups, or full-size models, it trains at the same time.
    """

    def __init__(self, problem: Problem, may_die: bool = False, share: Share = WHOLE) -> None:
        self._problem, self._share = problem, share
        self._peaks: dict[Stage, Peaks] = {stage: Peaks(problem, stage) for stage in ("surrogate", "target")}
        self.children = usable_children(problem)
        self.cores = max(1, self.children)
        if may_die and self.cores == 1:
            self.children = 0
        self._paces: dict[Stage, HangDetector] = {
            stage: HangDetector("no epoch was over", foreseen=problem.first_epoch_seconds(stage))
            for stage in self._peaks
        }
        if problem.device.type == "cpu":
            # Page faults on blocks that were freed a step before can take half of a fused step.
            keep_freed_memory()

    @property
    def machine(self) -> str:
        """Equal for devices that are equally fast."""
        return machine(self._problem.device)

    def plan(self, kinds: Mapping[str, Sequence[Trial]]) -> dict[str, Widths]:
        """How wide each core's groups of a kind should be; see `planned_widths`."""
        threads, peaks = torch.get_num_threads(), self._peaks["surrogate"]
        if self.cores > 1:
            torch.set_num_threads(1)
        try:
            found = planned_widths(
                self._problem, kinds, self.cores, self.children > 0, self.free, peaks, self._is_tight()
            )
        finally:
            torch.set_num_threads(threads)
        peaks.keep(self.free / self.cores)
        # In steps, so that what hardly matters is the same each time.
        steps = 100 * self.cores
        taken = {kind: peaks.expected(kind_of_group(kind, kinds[kind]), widths.most) for kind, widths in found.items()}
        shares = {kind: math.floor(size / max(1.0, self.free) * steps) / steps for kind, size in taken.items()}
        return {kind: replace(widths, share=shares[kind]) for kind, widths in found.items()}

    def _is_tight(self) -> bool:
        """Whether memory may not have room for a full-size model on each core, as far as is known; nor for others."""
        return self.cores > 1 and self.cores * self._peaks["target"].expected("of any kind") > self.free

    def train_groups(self, task: GroupTask, work: Work) -> GroupOutcome:
        """Train groups to their milestone, each in a process of its own, where one can be forked."""
        if not self.children:
            return self._train_here(task, work)
        tasks = task.parts()
        # With as many threads, what is trained again comes out the same to the last digit.
        threads = self.cores // self._at_once("surrogate", tasks, work)
        forked = partial(self._forked, "surrogate", self._train_part, work=work, threads=threads)
        outcomes, deaths = dict(forked(tasks)), Deaths()
        return joined(self._settled(part, outcomes[i], forked, deaths) for i, part in enumerate(tasks))

    def _train_part(self, task: GroupTask, work: Work, notify: Notify) -> GroupOutcome:
        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            work.doing.reached(epoch)
            notify(len(task.members), metrics)

        return train_group(self._problem, work.trials, task, work.load, work.should_stop, on_epoch)

    def _train_here(self, task: GroupTask, work: Work) -> GroupOutcome:
        """Train groups in this process; those that others died of, in parts, of which those that are whole fail."""
        what = f"training {list(task.members)} to epoch {task.span.stop}"
        if how := work.doing.blamed(what):
            following = parted(task, failure(how))
            if isinstance(following, GroupOutcome):
                return following
            return joined(self._train_here(part, work) for part in following)
        with work.doing.of(what):
            return self._train_part(task, work, work.notify)

    def _settled(self, task: GroupTask, outcome: GroupOutcome | Died, forked: _Forked, deaths: Deaths) -> GroupOutcome:
        """What a part gave; where its process died, what it gives with the device to itself."""
        if isinstance(outcome, GroupOutcome):
            return outcome
        following = deaths.of_group(task, outcome.how)
        if isinstance(following, GroupOutcome):
            return following
        return joined(self._settled(part, _alone(forked, part), forked, deaths) for part in following)

    def train_full_size(self, tasks: Sequence[FullSizeTask], work: Work, devices: int = 1) -> Iterator[FullSizeOutcome]:
        """Train at most `cores` full-size models at the same time, on the more threads the fewer they are.

        Args:
            devices: How many, this one included, share the trials that are trained to the tasks' milestone.

        Yields:
            What each gave, as they are done. Of wall time that they share, each counts its part.
        """
        if not self.children:
            yield from (self._train_target_here(task, work) for task in tasks)
            return
        # Not by how many tasks are left: what is trained after an interruption comes out the same to the last digit.
        lanes, fit = -(-tasks[0].beside // devices), self._at_once("target", tasks, work)
        if fit < min(len(tasks), self.cores):
            lanes = min(lanes, fit)
        threads = max(1, self.cores // lanes)
        forked = partial(self._forked, "target", self._train_target, work=work, threads=threads)
        died = []
        for i, outcome in forked(tasks):
            if isinstance(outcome, Died):
                died.append((tasks[i], outcome))
            else:
                yield replace(outcome, seconds=outcome.seconds / len(tasks), beside=len(tasks))
        deaths = Deaths()
        for task, outcome in died:
            while isinstance(outcome, Died):
                following = deaths.of_target(task, outcome.how)
                if isinstance(following, FullSizeTask):
                    following = _alone(forked, task)
                outcome = following
            yield outcome

    def _train_target_here(self, task: FullSizeTask, work: Work) -> FullSizeOutcome:
        what = f"training {task.key}"
        if how := work.doing.blamed(what):
            return ended(task, failure(how))
        with work.doing.of(what):
            return self._train_target(task, work, work.notify)

    def _train_target(self, task: FullSizeTask, work: Work, notify: Notify) -> FullSizeOutcome:
        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            work.doing.reached(epoch)
            notify(1, metrics)

        state = work.load(task.source) if task.source is not None else None
        return train_full_size_trial(self._problem, work.trials[task.number], task, state, work.should_stop, on_epoch)

    def _forked(
        self, stage: Stage, train: Callable[..., Any], tasks: Sequence[Any], work: Work, threads: int
    ) -> Iterator[tuple[int, Any]]:
        """Train tasks in a process each, as many at the same time as fit memory and cores, and learn what they take."""
        peaks, kinds = self._peaks[stage], [_kind(task, work) for task in tasks]

        def took(i: int, peak: int) -> None:
            peaks.learn(*kinds[i], peak)

        crowd = Crowd(self.free, self.cores, [peaks.expected(*kind) for kind in kinds], took)
        pieces = [partial(train, task, work) for task in tasks]
        yield from imap_forked(pieces, threads, work.notify, self._paces[stage], crowd)
        peaks.keep(self.free / self.cores)

    def _at_once(self, stage: Stage, tasks: Sequence[Any], work: Work) -> int:
        """How many of these tasks begin at the same time, for all that memory says."""
        peaks = self._peaks[stage]
        jobs = [Job(task.key, peaks.expected(*_kind(task, work)), 0.0, 0.0) for task in tasks]
        return len(beside(jobs, Room("", self.free, self.cores)))

    @property
    def free(self) -> float:
        """Bytes for all that trains at the same time; infinite where nobody tells."""
        share, found = self._share, usable_memory(self._problem.device)
        left = math.inf if found is None else found
        return (left if share.memory is None else min(left, share.memory)) / share.processes


def _kind(task: GroupTask | FullSizeTask, work: Work) -> tuple[str, int]:
    """By which a training's peak is known: what it is, and how many train as one."""
    if isinstance(task, FullSizeTask):
        return kind_of_target(work.trials[task.number]), 1
    (group,) = task.groups
    return kind_of_group(group.kind, [work.trials[n] for n in group.members]), len(group.members)


_Forked = Callable[[Sequence[Any]], Iterator[tuple[int, Any]]]
"""Trains tasks at the same time, in a process each: what ends one of them does not end this one."""


def _alone(forked: _Forked, task: Any) -> Any:
    return next(outcome for _, outcome in forked([task]))
