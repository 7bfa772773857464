"""What the living nodes of a Ray cluster hold, counted in workers."""

from __future__ import annotations

import time
from collections.abc import Mapping

import ray

from hydro_rasda.schedulers import worker_slots


class Slots:
    """The number of workers that the cluster's living nodes hold, asked for at most once a second.

    Args:
        worker: Resources of one worker, in Ray's words: `{"CPU": 1, "GPU": 1}`.
    """

    _fresh_for_s = 1.0

    def __init__(self, worker: Mapping[str, float]) -> None:
        self._worker = dict(worker)
        self._asked_at = -float("inf")
        self._count = 0

    def count(self) -> int:
        """Workers that fit now; one worker never spans two nodes."""
        if time.monotonic() - self._asked_at > self._fresh_for_s:
            self._count = worker_slots(living_nodes(), self._worker)
            self._asked_at = time.monotonic()
        return self._count

    def check(self, workers: int) -> None:
        """Raises ValueError unless a trial of `workers` workers fits at all."""
        count = self.count()
        if count == 0:
            raise ValueError(
                f"`resources_per_worker` is {self._worker}, but must fit on a node; the nodes have {living_nodes()}"
            )
        if workers > count:
            raise ValueError(
                f"`workers` is {workers}, but must be <= {count}, the workers of {self._worker} that the cluster holds"
            )


def living_nodes() -> list[dict[str, float]]:
    """Resources of each living node, without Ray's markers for the node itself."""
    return [
        {name: amount for name, amount in node["Resources"].items() if not name.startswith("node:")}
        for node in ray.nodes()
        if node["Alive"]
    ]
