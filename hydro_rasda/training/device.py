"""One device, as the sweep counts them: a GPU, or a CPU, whose cores train at the same time.

On several cores, each trains its own fused group of surrogates, and full-size trials share them: with every halving,
the trials that are left get more threads (RASDA's doubling in space, on one machine).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fusion import keep_freed_memory
from hydro_rasda.contracts import EpochMetrics, GroupOutcome, GroupTask, TargetOutcome, TargetTask, Widths
from hydro_rasda.problem import Problem, Trial
from hydro_rasda.run.doing import Doing
from hydro_rasda.run.events import Stage
from hydro_rasda.training.deaths import Deaths, ended, failure, parted
from hydro_rasda.training.forks import Died, Notify, can_be_pickled, imap_forked, most_children
from hydro_rasda.training.full_size import train_target
from hydro_rasda.training.fused import Load, joined, train_group
from hydro_rasda.training.pace import Pace
from hydro_rasda.training.planning import machine, planned_widths


@dataclass(frozen=True)
class Work:
    """What training needs beside a task.

    Attributes:
        trials: By number.
        load: Gives an earlier task's checkpoint by its key, on the device.
        should_stop: Asked after each epoch.
        notify: Called with how many epochs were trained, over all models that train as one, and the metrics after them.
        doing: Told what this process trains itself.
    """

    trials: Mapping[int, Trial]
    load: Load
    should_stop: Callable[[], bool]
    notify: Notify
    doing: Doing = field(default_factory=Doing)


class Device:
    """Trains what it is given; returns when that is done.

    Args:
        problem: What is tuned.
        may_die: Whether this process is the device's own, which is replaced where it dies: a single core then trains in
            it, and not in one forked of it.

    Attributes:
        children: How many processes are forked to train at the same time; 0 where this one trains.
        cores: How many groups, or full-size models, it trains at the same time.
    """

    def __init__(self, problem: Problem, may_die: bool = False) -> None:
        self._problem = problem
        self.children = usable_children(problem)
        self.cores = max(1, self.children)
        if may_die and self.cores == 1:
            self.children = 0
        self._paces: dict[Stage, Pace] = {"surrogate": Pace(), "target": Pace()}
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
            return planned_widths(self._problem, kinds, self.cores, forked=self.children > 0)
        finally:
            torch.set_num_threads(threads)

    def train_groups(self, task: GroupTask, work: Work) -> GroupOutcome:
        """Train groups to their milestone, each in a process of its own, where one can be forked."""
        if not self.children:
            return self._train_here(task, work)
        tasks = task.parts()
        # With as many threads, what is trained again comes out the same to the last digit.
        forked = partial(self._forked, "surrogate", self._train_part, work=work, threads=self.cores // len(tasks))
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

    def train_targets(self, tasks: Sequence[TargetTask], work: Work, devices: int = 1) -> Iterator[TargetOutcome]:
        """Train at most `cores` full-size models at the same time, on the more threads the fewer they are.

        Args:
            tasks: What to train.
            work: What that needs.
            devices: How many, this one included, share the trials that are trained to the tasks' milestone.

        Yields:
            What each gave, as they are done. Of wall time that they share, each counts its part.
        """
        if not self.children:
            yield from (self._train_target_here(task, work) for task in tasks)
            return
        threads = max(1, self.cores // -(-tasks[0].beside // devices))
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
                if isinstance(following, TargetTask):
                    following = _alone(forked, task)
                outcome = following
            yield outcome

    def _train_target_here(self, task: TargetTask, work: Work) -> TargetOutcome:
        what = f"training {task.key}"
        if how := work.doing.blamed(what):
            return ended(task, failure(how))
        with work.doing.of(what):
            return self._train_target(task, work, work.notify)

    def _train_target(self, task: TargetTask, work: Work, notify: Notify) -> TargetOutcome:
        def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
            work.doing.reached(epoch)
            notify(1, metrics)

        state = work.load(task.source) if task.source is not None else None
        return train_target(self._problem, work.trials[task.number], task, state, work.should_stop, on_epoch)

    def _forked(
        self, stage: Stage, train: Callable[..., Any], tasks: Sequence[Any], work: Work, threads: int
    ) -> Iterator[tuple[int, Any]]:
        return imap_forked([partial(train, task, work) for task in tasks], threads, work.notify, self._paces[stage])


_Forked = Callable[[Sequence[Any]], Iterator[tuple[int, Any]]]
"""Trains tasks at the same time, in a process each: what ends one of them does not end this one."""


def _alone(forked: _Forked, task: Any) -> Any:
    return next(outcome for _, outcome in forked([task]))


def usable_children(problem: Problem) -> int:
    """How many processes are forked to train a problem's models at the same time; 0 where this one trains.

    As many as its device allows, if they can share its data.

    An open file has one position for all forked processes, so that what two of them read is right for neither. What
    holds a file or a connection is recognised by that it cannot be pickled.
    """
    most = most_children(problem.device)
    return most if most and can_be_shared(problem) else 0


def can_be_shared(problem: Problem) -> bool:
    """Whether several processes can train a problem's models: see `usable_children`."""
    return can_be_pickled(
        (problem.model_fn, problem.objective, problem.train_data, problem.val_data, problem.full_size, problem.metrics)
    )
