"""Units of work that guests train in pieces. A unit has its outcome so far, and knows which pieces are left.

A guest ends its piece early if its host leaves, and after `checkpoint_s`. The piece is then saved as a checkpoint of
the run, from which the next piece resumes. If this process of `tune` is killed, the next call also resumes from that
checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.contracts import History, Outcome, Span, Task, group_key
from hydro_rasda.run.state import Run
from hydro_rasda.training.group_training import cut_down
from hydro_rasda.training.retry_policy import Deaths

_SO_FAR = "so_far"
"""In the checkpoint of a full-size model, this key has the history of the epochs that the unit has trained so far."""


def _is_over(run: Run, heat: HeatName, metrics: Mapping[str, float]) -> bool:
    """Tell whether a model with these metrics after an epoch trains no further: it has diverged, or is good enough.

    The process that trains the model ends by the same rule. The user's own training function need not report a training
    loss, so its metric tells whether it has diverged.
    """
    settings, is_own = run.settings, run.problem.is_own(heat)
    score = metrics[settings.metric]
    loss = score if is_own else metrics.get("train_loss", score)
    full_size = heat == "race" or (is_own and settings.sweep.surrogate == 1)
    return not math.isfinite(loss) or (full_size and settings.good_enough(score))


class GroupWork:
    """A fused group's training from one milestone to the next; `outcome` has the results of the pieces so far.

    Trials that never began are not in the outcome's history. `saved` names the checkpoints of pieces, which can be
    deleted once the outcome is recorded.
    """

    def __init__(self, run: Run, task: Task, threads: int) -> None:
        self.task, self.threads, self._run = task, threads, run
        self.outcome = Outcome([], {}, {})
        self.saved: list[str] = []
        self._left = 0

    @property
    def done(self) -> bool:
        return self._left == 0

    def begin(self) -> Sequence[Task]:
        """Return the tasks that guests must train: the whole unit, or its rest if an earlier process trained a part."""
        self._left = 1
        key = self._key(self.task.members)
        if not self._run.can_load(key):
            return [self.task]
        so_far = self._run.store.load(key, self._run.problem.device)
        if so_far["members"] != list(self.task.members):
            return [self.task]
        history = {
            number: [(epoch, metrics) for epoch, metrics in epochs] for number, epochs in so_far["history"].items()
        }
        return self.took(self.task, Outcome(so_far["parts"], history, so_far["failures"]), go_on=True)

    def took(self, task: Task, found: Outcome, go_on: bool) -> Sequence[Task]:
        """Add `found`, the outcome of a guest's piece `task`. Return tasks for its rest; none if `go_on` is False."""
        self._left -= 1
        whole = self.outcome
        for number, epochs in found.history.items():
            whole.history.setdefault(number, []).extend(epochs)
        whole.failures |= found.failures
        goes_on = [go_on and self._goes_on(part["members"]) for part in found.checkpoint]
        whole.checkpoint += [part for part, more in zip(found.checkpoint, goes_on) if not more]
        left = [part for part, more in zip(found.checkpoint, goes_on) if more]
        if not left:
            return []
        key = self._keep(task, found)
        return self._put([self._rest(task, key, part["members"]) for part in left])

    def _goes_on(self, members: Iterable[int]) -> bool:
        """Return whether a group must train further, because it has epochs left and not all members are over."""
        last = [self.outcome.history[number][-1] for number in members]
        over = all(_is_over(self._run, self.task.heat, metrics) for _, metrics in last)
        return last[0][0] < self.task.span.stop and not over

    def _keep(self, task: Task, found: Outcome) -> str:
        key, members = self._key(task.members), list(task.members)
        history = {number: self.outcome.history[number] for number in members}
        failures = {number: error for number, error in self.outcome.failures.items() if number in members}
        kept = {"members": members, "parts": found.checkpoint, "history": history, "failures": failures}
        self._run.save(key, kept, members)
        self.saved.append(key)
        return key

    def _rest(self, task: Task, source: str, members: Sequence[int]) -> Task:
        (group,) = task.groups
        span = Span(self.outcome.history[members[0]][-1][0], self.task.span.stop)
        return replace(task, sources=(source,), span=span, copies={}).of(group.of(members))

    def _key(self, members: Sequence[int]) -> str:
        """Return the name of the checkpoint of a piece. Halves of a piece have other names than the whole."""
        return f"{group_key(self.task.heat, self.task.span, members)}/so-far-of-{len(members)}"

    def died(self, task: Task, how: str, deaths: Deaths) -> Sequence[Task]:
        """Return the tasks to train after piece `task` killed its guest: the piece again, its halves, or none."""
        following = deaths.of(task, how)
        self._left -= 1
        if isinstance(following, list):
            return self._put(following)
        self.outcome.history = {**following.history, **self.outcome.history}
        self.outcome.failures |= following.failures
        return []

    def give_up(self, task: Task) -> None:
        """End a piece without further training. The epochs of earlier pieces still count."""
        self._left -= 1
        if task.span.start > self.task.span.start:
            run = self._run
            saved = run.store.load(task.sources[0], run.problem.device)
            whole = [part for part in saved["parts"] if part["members"] == list(task.members)]
            # After a death, the piece may have only half of the saved members. Then cut the saved state down to these.
            problem = run.problem.at_width(task.width)
            self.outcome.checkpoint += whole or [cut_down(problem, run.history.trials, task, lambda key: saved)]

    def _put(self, tasks: Sequence[Task]) -> Sequence[Task]:
        self._left += len(tasks)
        return tasks


class TargetWork:
    """The training of a full-size model from one milestone to the next, with the methods of `GroupWork`."""

    def __init__(self, run: Run, task: Task, threads: int) -> None:
        self.task, self.threads, self._run = task, threads, run
        self.outcome = Outcome([], {}, {})
        self.saved: list[str] = []
        self.done = False
        self._history: History = []
        self._seconds = 0.0

    def begin(self) -> Sequence[Task]:
        key = self._key
        if not self._run.can_load(key):
            return [self.task]
        state = self._run.store.load(key, self._run.problem.device)
        history = [(epoch, metrics) for epoch, metrics in state.pop(_SO_FAR)]
        return self.took(self.task, Outcome.of_model(self.task.number, state, history, 0.0), go_on=True)

    @property
    def _key(self) -> str:
        return f"{self.task.key}/so-far"

    def took(self, task: Task, found: Outcome, go_on: bool) -> Sequence[Task]:
        self._history += found.epochs
        self._seconds += found.seconds
        if found.error is None and go_on and not found.ended and self._goes_on():
            self._run.save(self._key, {**found.state, _SO_FAR: self._history}, [task.number])
            self.saved = [self._key]
            return [replace(self.task, span=Span(self._history[-1][0], task.span.stop), sources=(self._key,))]
        history = [] if found.error is not None else self._history
        self.outcome = replace(found, history={task.number: history}, seconds=self._seconds)
        self.done = True
        return []

    def _goes_on(self) -> bool:
        epoch, metrics = self._history[-1]
        return epoch < self.task.span.stop and not _is_over(self._run, self.task.heat, metrics)

    def died(self, task: Task, how: str, deaths: Deaths) -> Sequence[Task]:
        following = deaths.of(task, how)
        if isinstance(following, list):
            return following
        self.outcome, self.done = following, True
        return []

    def give_up(self, task: Task) -> None:
        self.done = True
        if self._history:
            state = self._run.store.load(self._key, self._run.problem.device)
            del state[_SO_FAR]
            self.outcome = Outcome.of_model(task.number, state, self._history, self._seconds)
