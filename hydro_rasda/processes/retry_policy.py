"""The rules for a training whose process died, wherever it ran."""

from __future__ import annotations

from collections import Counter

from hydro_rasda.contracts import FullSizeOutcome, FullSizeTask, GroupOutcome, GroupTask
from hydro_rasda.run.locks_and_crashes import DEATHS as DEATHS

RETRIES = 2
"""So often a full-size trial is tried again, from its last checkpoint, that raised."""


class Deaths:
    """Counts deaths by task, and says what to do next.

    A training that died with its process is trained once more, whole: others beside it may have used up the memory.
    Then a group is halved, so that only those trials fail whose own processes die; each half has as many chances.
    """

    def __init__(self) -> None:
        self._counts: Counter[object] = Counter()

    def of_group(self, task: GroupTask, how: str) -> list[GroupTask] | GroupOutcome:
        """The tasks to train in the place of one whose process died, maybe itself; or the outcome of a failed trial."""
        return [task] if self.again((task.span, task.members)) else parted(task, failure(how))

    def of_target(self, task: FullSizeTask, how: str) -> FullSizeTask | FullSizeOutcome:
        """After a death of the process that trained a full-size model: the task again, or its outcome at last."""
        return task if self.again(task) else ended(task, failure(how))

    def again(self, task: object) -> bool:
        """After a death of the process that did anything: whether to do it once more, as it was."""
        self._counts[task] += 1
        return self._counts[task] < DEATHS


def parted(task: GroupTask, error: str) -> list[GroupTask] | GroupOutcome:
    """Of groups that no process survives: what takes less, or the outcome of a trial that has failed."""
    members = task.members
    return task.smaller() if len(members) > 1 else GroupOutcome([], {members[0]: []}, {members[0]: error})


def ended(task: FullSizeTask, error: str) -> FullSizeOutcome:
    """The outcome of a full-size model that no process survives."""
    return FullSizeOutcome(task, None, [], error, 0.0, died=True)


def failure(how: str, did: str = "trained") -> str:
    """Of what no process has survived, in words."""
    return f"the process that {did} it died {DEATHS} times: {how}"
