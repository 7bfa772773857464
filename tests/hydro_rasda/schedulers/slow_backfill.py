"""Placement as one reads it: everything that waits and everything that runs is sorted anew for each decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hydro_rasda.schedulers import Placement, Waiting


class Running(NamedTuple):
    """Workers that a trial holds, and seconds until it gives them back."""

    workers: int
    seconds: float


def slow_place(
    waiting: Sequence[Waiting], overtaken: int, running: Sequence[Running], free: int, patience: int
) -> Placement:
    """What `place` decides; trials in order of arrival, those that run in order of start."""
    if not waiting:
        return Placement()
    line = sorted(waiting, key=lambda w: -w.rung)
    if overtaken >= patience:
        line.remove(waiting[0])
        line.insert(0, waiting[0])
    head, *others = line
    head = head._replace(workers=min(head.workers, free + sum(r.workers for r in running)))
    if free == 0:
        return Placement(None, head)
    if head.workers <= free:
        return Placement(head)
    shadow, spare = reservation(head.workers - free, running)
    for other in others:
        if other.workers <= free and (other.workers <= spare or other.seconds < shadow):
            return Placement(other, head)
    return Placement(None, head)


def reservation(missing: int, running: Sequence[Running]) -> tuple[float, int]:
    """Seconds until `missing` more workers are free, and how many the first in line then leaves over."""
    freed = 0
    for r in sorted(running, key=lambda r: r.seconds):
        freed += r.workers
        if freed >= missing:
            if math.isfinite(r.seconds):
                return r.seconds, freed - missing
            break
    sums = {0}
    for r in running:
        sums |= {total + r.workers for total in sums}
    return 0.0, min(total for total in sums if total >= missing) - missing
