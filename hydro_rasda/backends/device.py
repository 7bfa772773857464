"""One device, as the sweep counts them: a GPU, or a CPU, whose cores train beside each other.

On several cores, each trains its own fused group of surrogates, and full-size trials share them: with every halving,
the trials that are left get more threads (RASDA's doubling in space, on one machine).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fusion import keep_freed_memory

from ..forks import Died, Tell, beside
from ..fused import GroupOutcome, GroupTask, Load, joined, train_group
from ..grouping import Widths
from ..planning import machine, planned_widths
from ..problem import Problem, Trial
from ..single import TargetOutcome, TargetTask, train_target
from ..train import EpochMetrics

DEATHS = 2
"""What is trained by a process that died this often is halved; a single trial then counts as failed."""


@dataclass(frozen=True)
class Work:
    """What training needs beside a task.

    Attributes:
        trials: By number.
        load: Gives an earlier task's checkpoint by its key, on the device.
        should_stop: Asked after each epoch.
        tell: Told of epochs trained, and of the metrics after them.
    """

    trials: Mapping[int, Trial]
    load: Load
    should_stop: Callable[[], bool]
    tell: Tell


class Device:
    """Trains what it is given; returns when that is done.

    Attributes:
        cores: How many groups, or full-size models, it trains beside each other.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.cores = problem.cores
        if problem.device.type == "cpu":
            # Page faults on blocks that were freed a step before can take half of a fused step.
            keep_freed_memory()

    @property
    def machine(self) -> str:
        """Equal for devices that are equally fast."""
        return machine(self._problem.device)

    def plan(self, kinds: Mapping[str, Sequence[Trial]]) -> dict[str, Widths]:
        """How wide each core's groups of a kind should be; see `planned_widths`."""
        threads = torch.get_num_threads()
        if self.cores > 1:
            torch.set_num_threads(1)
        try:
            return planned_widths(self._problem, kinds, self.cores)
        finally:
            torch.set_num_threads(threads)

    def train_groups(self, task: GroupTask, work: Work) -> GroupOutcome:
        """Train groups to their milestone, each in one process."""
        tasks = task.parts()
        if len(tasks) == 1:
            return self._train_part(task, work, work.tell)
        outcomes = dict(self._beside(self._train_part, tasks, work, self.cores // len(tasks)))
        return joined(self._settled(part, outcomes[i], work) for i, part in enumerate(tasks))

    def _train_part(self, task: GroupTask, work: Work, tell: Tell) -> GroupOutcome:
        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            tell(len(task.members), metrics)

        return train_group(self._problem, work.trials, task, work.load, work.should_stop, on_epoch)

    def _settled(self, task: GroupTask, outcome: GroupOutcome | Died, work: Work, deaths: int = 0) -> GroupOutcome:
        """What a part gave; where its process died, what it gives with the device to itself, whole, then halved."""
        if isinstance(outcome, GroupOutcome):
            return outcome
        deaths, members = deaths + 1, task.members
        if deaths == DEATHS and len(members) == 1:
            return GroupOutcome([], {members[0]: []}, {members[0]: told_of_deaths(outcome.how)})
        tasks = [task] if deaths < DEATHS else task.smaller()
        return joined(
            self._settled(part, self._alone(self._train_part, part, work), work, deaths % DEATHS) for part in tasks
        )

    def train_targets(self, tasks: Sequence[TargetTask], work: Work) -> Iterator[TargetOutcome]:
        """Train at most `cores` full-size models beside each other; yields what each gave, as they are done.

        Of wall time that they share, each counts its part.
        """
        threads = max(1, self.cores // tasks[0].beside)
        if threads == self.cores:
            yield from (self._train_target(task, work, work.tell) for task in tasks)
            return
        died = []
        for i, outcome in self._beside(self._train_target, tasks, work, threads):
            if isinstance(outcome, Died):
                died.append(tasks[i])
            else:
                yield replace(outcome, seconds=outcome.seconds / len(tasks))
        for task in died:
            outcome = self._alone(self._train_target, task, work)
            yield (
                TargetOutcome(task, None, [], told_of_deaths(outcome.how), 0.0)
                if isinstance(outcome, Died)
                else outcome
            )

    def _train_target(self, task: TargetTask, work: Work, tell: Tell) -> TargetOutcome:
        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            tell(1, metrics)

        state = work.load(task.source) if task.source is not None else None
        return train_target(self._problem, work.trials[task.number], task, state, work.should_stop, on_epoch)

    def _beside(
        self, train: Callable[..., Any], tasks: Sequence[Any], work: Work, threads: int
    ) -> Iterator[tuple[int, Any]]:
        return beside([partial(train, task, work) for task in tasks], threads, work.tell)

    def _alone(self, train: Callable[..., Any], task: Any, work: Work) -> Any:
        """In a process of its own all the same: what ends it must not end this one."""
        return next(outcome for _, outcome in self._beside(train, [task], work, self.cores))


def told_of_deaths(how: str) -> str:
    """Why a trial counts as failed whose process died, the last time like this."""
    return f"the process that trained it died {DEATHS} times: {how}"
