"""What keeps a trial from its first step, once it has workers: the head node, its own start, its nodes' data."""

from __future__ import annotations

from hydro_rasda.simulator.cluster import Cluster
from hydro_rasda.simulator.cost import CostModel


class Launching:
    """The head node, which starts one process after another, and the nodes, which copy the data when the search begins.

    All nodes copy at once, from the same storage, and so are done together.
    """

    def __init__(self, cluster: Cluster, cost: CostModel) -> None:
        self._each, self._restart = cluster.launch_seconds, cost.restart_seconds
        self._free_at = 0.0
        nodes = sum(kind.nodes for kind in cluster.kinds)
        self._staged_at = nodes * cluster.staged_bytes / cluster.storage

    def first_step(self, workers: int, now: float) -> float:
        """When a trial that is given workers now begins its first step; the head node is busy with it until then."""
        self._free_at = max(now, self._free_at) + workers * self._each
        return max(self._free_at + self._restart, self._staged_at)
