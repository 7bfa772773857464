"""Rules of all backends for retries after a training raised an error or its process died."""

from __future__ import annotations

from collections import Counter

from hydro_rasda.contracts import Outcome, Task
from hydro_rasda.run.crash_log import DEATHS as DEATHS

RETRIES = 2
"""A full-size trial that raised an error is tried again at most this many times, from its last checkpoint."""


class Deaths:
    """Count the deaths of each task's process, and decide what to train next.

    After the first death, the whole task is tried once more, because other processes may have used up the memory. After
    the second, a group is halved, so that a trial fails only if its own process dies. Each half has the same number of
    tries.
    """

    def __init__(self) -> None:
        self._counts: Counter[object] = Counter()

    def of(self, task: Task, how: str) -> list[Task] | Outcome:
        """Return the tasks to train after the process of `task` died, or the outcome of a failed trial.

        The tasks are `task` itself or its halves. `how` says how the process died.
        """
        if self.again((task.key, task.span, task.members)):
            return [task]
        number, *others = task.members
        return task.smaller() if others else Outcome.failed(number, failure(how), died=True)

    def again(self, task: object) -> bool:
        """Count a death of the process that did `task`, and tell whether to do `task` once more, unchanged."""
        self._counts[task] += 1
        return self._counts[task] < DEATHS


def failure(how: str, did: str = "trained") -> str:
    """Return the error message for work whose process died at every try; `did` is the verb for the work."""
    return f"the process that {did} it died {DEATHS} times: {how}"
