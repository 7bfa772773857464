"""Decide how many devices of a pool train a full-size trial, and which ones: RASDA's doubling in space (section 3.1).

Each of the devices is a worker of the trial: a rank of DDP or FSDP.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from hydro_rasda.contracts import Task
from hydro_rasda.history.full_size import trained_spans
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import RASDA, Growth
from hydro_rasda.settings.config import SCALING_EFFICIENCY
from hydro_rasda.training.worker_reports import noise_in_workers


class WorkerNumbers:
    """Decide with how many workers each full-size trial of a run trains.

    Args:
        grows: Used if `race.workers` is 1 and `race.max_workers` is None. If True, trials grow all the same. If False,
            they keep one worker.

    Attributes:
        asked: True if trials may have several workers.
        first: Number of workers with which a trial starts.
    """

    def __init__(self, run: Run, grows: bool) -> None:
        settings, race = run.settings, run.settings.race
        self._run = run
        self.asked = race.workers > 1 or (grows if race.max_workers is None else race.max_workers > 1)
        self.first = race.workers
        self._rule = RASDA(
            settings.max_t,
            settings.first_look,
            race.reduction_factor,
            race.scaling_factor,
            race.workers,
            race.max_workers,
            mode=settings.mode,
            grow=race.grow,
            least_efficiency=race.least_efficiency,
            batch_over_noise=race.batch_over_noise,
        )

    def of(self, task: Task, capacity: int) -> int:
        """Return the number of workers for a task of a full-size trial, at most `capacity`."""
        rule, start = self._rule, task.span.start
        last = self._run.history.metrics["race", task.number][-1] if start else {}
        held = int(last.get("workers", rule.workers))
        if rule.grow == "efficient" and start not in rule.milestones:
            return min(held, capacity)
        growth = Growth(
            held=held,
            due=rule.workers_at(start),
            base=rule.workers,
            alive=task.beside,
            capacity=capacity,
            seconds={},
            free=capacity,
            sharing=task.beside,
            own=self._epoch_seconds(task.number),
            efficiency=last.get(SCALING_EFFICIENCY),
            noise_scale=noise_in_workers(last, held),
        )
        return min(rule.resize(growth), capacity)

    def _epoch_seconds(self, number: int) -> dict[int, float]:
        taken = defaultdict[int, list[float]](list)
        for trial, unit in trained_spans(self._run.store.units()):
            if trial == number and unit.lines:
                taken[int(unit.lines[-1].get("workers", 1))].append(unit.seconds / len(unit.lines))
        return {workers: median(seconds) for workers, seconds in taken.items()}


def nearest(nodes: Mapping[int, str], count: int) -> list[int]:
    """Choose `count` devices on as few nodes as possible.

    If one node has enough idle devices, use a single node. Among several such nodes, choose the one with the fewest
    idle devices. `nodes` maps each idle device to its node.

    >>> nodes = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "c"}
    >>> nearest(nodes, 1), nearest(nodes, 2), nearest(nodes, 4)
    ([5], [3, 4], [0, 1, 2, 3])
    """
    of_node = defaultdict[str, list[int]](list)
    for device, node in nodes.items():
        of_node[node].append(device)
    smallest_first = sorted(of_node.values(), key=len)
    whole = next((devices for devices in smallest_first if len(devices) >= count), None)
    return (whole or [device for devices in reversed(smallest_first) for device in devices])[:count]
