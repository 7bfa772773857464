"""The rules for a training whose process died, wherever it ran."""

from __future__ import annotations

from collections import Counter

from hydro_rasda.contracts import Outcome, Task
from hydro_rasda.run.crash_log import DEATHS as DEATHS

RETRIES = 2
"""So often a full-size trial is tried again, from its last checkpoint, that raised."""


class Deaths:
    """Counts deaths by task, and says what to do next.

    A training that died with its process is trained once more, whole: others beside it may have used up the memory.
    Then a group is halved, so that only those trials fail whose own processes die; each half has as many chances.
    """

    def __init__(self) -> None:
        self._counts: Counter[object] = Counter()

    def of(self, task: Task, how: str) -> list[Task] | Outcome:
        """The tasks to train in the place of one whose process died, maybe itself; or the outcome of a failed trial."""
        if self.again((task.key, task.span, task.members)):
            return [task]
        number, *others = task.members
        return task.smaller() if others else Outcome.failed(number, failure(how), died=True)

    def again(self, task: object) -> bool:
        """After a death of the process that did anything: whether to do it once more, as it was."""
        self._counts[task] += 1
        return self._counts[task] < DEATHS


def failure(how: str, did: str = "trained") -> str:
    """Of what no process has survived, in words."""
    return f"the process that {did} it died {DEATHS} times: {how}"
