"""Train a list of tasks, each as soon as a device is idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from hydro_rasda.contracts import Devices, Finished, Task


def train_tasks(
    devices: Devices, tasks: Iterable[Task], may_begin: Callable[[], bool] = lambda: True
) -> Iterator[Finished]:
    """Train tasks in order. Before each one begins, ask `may_begin`; if it returns False, no further task begins.

    Yields:
        Each task that this call began, once it is done. Also each earlier task that ends during this call.
    """
    waiting, under_way = deque(tasks), set[str]()
    while True:
        while waiting and (idle := devices.idle(waiting[0])):
            if may_begin():
                under_way.add(waiting[0].key)
                devices.start(idle[0], waiting.popleft())
            else:
                waiting.clear()
        if not (waiting or under_way) or not devices.busy():
            return
        for finished in devices.finished():
            under_way.discard(finished.task.key)
            yield finished
