"""Train a list of tasks on devices as these become idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from hydro_rasda.contracts import Devices, Finished, Task


def train_tasks(
    devices: Devices, tasks: Iterable[Task], may_begin: Callable[[], bool] = lambda: True
) -> Iterator[Finished]:
    """Train tasks in order, until `may_begin` returns False when a device is idle.

    Yields:
        Each task that began, once it is done; also each task that had begun before this call and ends during it.
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
