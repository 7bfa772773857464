"""The workers that the living nodes of a Ray cluster hold, and requests for more nodes to Ray's autoscaler."""

from __future__ import annotations

import atexit
import logging
import math
import socket
import time
from collections.abc import Collection, Mapping

import ray
from ray.autoscaler.sdk import request_resources

from hydro_rasda.common.argument_checks import require
from hydro_rasda.schedulers import worker_slots

logger = logging.getLogger(__name__)


class Slots:
    """The number of workers that the cluster's living nodes hold. Ray is asked at most once a second."""

    _fresh_for_s, _patience_s = 1.0, 30.0

    def __init__(self, worker: Mapping[str, float]) -> None:
        self._worker = dict(worker)
        self._asked_at = -math.inf
        self._count = 0
        self._stalls_since = math.inf
        self._most, self._most_until, self._lasts_s = 0, 0.0, 600.0

    def count(self) -> int:
        """Return the number of workers that fit now. A worker never spans two nodes."""
        if time.monotonic() - self._asked_at > self._fresh_for_s:
            self._count = worker_slots(living_nodes(self._worker), self._worker)
            self._asked_at = time.monotonic()
        return min(self._count, self._most) if time.monotonic() < self._most_until else self._count

    def heed_others(self, stalls: bool) -> None:
        """Count only the workers that are free, after trials have waited in vain for more.

        Other programs hold the rest, for example the Ray task in which the script itself runs. Ray would wait forever
        for the placement group of a trial that is due all workers. More workers are tried again later, ever more
        seldom.

        Args:
            stalls: True if trials wait for workers, and no trial runs that could free some.
        """
        now = time.monotonic()
        self._stalls_since = min(self._stalls_since, now) if stalls else math.inf
        if now - self._stalls_since < self._patience_s:
            return
        self._stalls_since = now
        free, count = worker_slots([ray.available_resources()], self._worker), self.count()
        if free > 0 and count > 1:
            self._most, self._most_until = min(free, count - 1), now + self._lasts_s
            logger.warning(
                f"No trial runs, and Ray has found no room for the next one for {self._patience_s:g} s: other programs "
                f"hold a part of the cluster. For {self._lasts_s:g} s, trials get at most {self._most} workers."
            )
            self._lasts_s *= 2

    def check(self, workers: int) -> None:
        """Raise ValueError unless the cluster can hold a trial with `workers` workers."""
        count = self.count()
        rule = f"what fits on a node; the nodes have {living_nodes(self._worker)}"
        require(count > 0, "resources_per_worker", self._worker, rule)
        rule = f"<= {count}, the workers of {self._worker} that the cluster holds"
        require(workers <= count, "workers", workers, rule)


def living_nodes(asked: Collection[str] = ()) -> list[dict[str, float]]:
    """Return the resources of each living node, without Ray's markers for the node itself, except those `asked` for."""
    return [
        {name: of for name, of in node["Resources"].items() if name in asked or not name.startswith("node:")}
        for node in ray.nodes()
        if node["Alive"]
    ]


def is_lost(node_id: str) -> bool:
    """Return whether a node has ended. Ray itself notices only after some 15 seconds without an answer."""
    node = next((node for node in ray.nodes() if node["NodeID"] == node_id), None)
    return node is None or not node["Alive"] or not answers(node["NodeManagerAddress"], node["NodeManagerPort"], 1.0)


def answers(host: str, port: int, within_s: float) -> bool:
    """Return whether a process listens at an address, and accepts a connection within `within_s` seconds."""
    try:
        socket.create_connection((host, port), timeout=within_s).close()
    except OSError:
        return False
    return True


class NodeRequests:
    """Requests for more nodes. A trial waits for them for at most `wait_s` seconds; `wait_s=0` requests nothing.

    Ray's placement groups also request nodes. But they wait forever if there is no autoscaler, or if it is at its
    limit.
    """

    def __init__(self, worker: Mapping[str, float], wait_s: float) -> None:
        self._worker, self._wait_s = dict(worker), wait_s
        self._until: dict[int, float] = {}
        self._had = 0
        self._asked = 0
        if wait_s:
            atexit.register(self._end)

    def ask(self, due: int, held: int, count: int) -> None:
        """Request the nodes that a trial lacks.

        Args:
            due: Number of workers that the trial is due.
            held: Number of workers that other trials hold.
            count: Number of workers that the cluster's nodes hold.
        """
        if not self._wait_s or due <= count:
            return
        self._note(count)
        if due in self._until:
            return
        self._until[due] = time.monotonic() + self._wait_s
        self._asked = max(self._asked, held + due)
        logger.warning(
            f"A trial is due {due} workers, and the nodes hold {count}: Ray's autoscaler is asked for more, and the "
            f"trial waits {self._wait_s:g} s at most."
        )
        request_resources(bundles=[self._worker] * self._asked)

    def awaited(self, due: int, count: int) -> bool:
        """Return whether trials that are due this number of workers still wait for nodes."""
        self._note(count)
        return due > count and time.monotonic() < self._until.get(due, 0.0)

    def settle(self, count: int) -> None:
        """Withdraw the request for nodes once no trial waits for them. Nodes that trials use stay."""
        if self._asked and not any(self.awaited(due, count) for due in list(self._until)):
            self._asked = 0
            request_resources(bundles=[])

    def _end(self) -> None:
        """Withdraw the request if the script ends while trials wait, because Ray keeps a request forever."""
        if self._asked and ray.is_initialized():
            request_resources(bundles=[])

    def _note(self, count: int) -> None:
        """Note how many workers the nodes hold now.

        If nodes have come, restart the wait of trials that still need more workers, because more nodes may come.
        """
        if count > self._had:
            self._until = {due: time.monotonic() + self._wait_s for due in self._until if due > count}
        self._had = count
