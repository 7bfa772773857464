"""Nodes and the workers on them: who sits where, and which nodes are up."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from hydro_rasda.checks import check_int, check_number

from .cost import Spread


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one kind.

    Attributes:
        nodes: How many.
        gpus: Workers on each.
        speed: Of a worker; 1 is the device that the cost model speaks of.
    """

    nodes: int
    gpus: int
    speed: float = 1.0

    def __post_init__(self) -> None:
        check_int("nodes", self.nodes, at_least=1)
        check_int("gpus", self.gpus, at_least=1)
        check_number("speed", self.speed, above=0.0)


@dataclass(frozen=True)
class Cluster:
    """A machine.

    Attributes:
        kinds: Its nodes.
        storage: Bytes per second of the shared file system, split evenly between the trials that run.
        slow_share: Share of the nodes, drawn by the seed, that run at ``slow_speed``.
        slow_speed: Their speed over that of their kind.
        mtbf: Mean seconds between failures of one node, exponentially distributed; inf for none.
        repair_seconds: Until a failed node is back.

    Raises:
        TypeError: a number is none.
        ValueError: a number is out of range, or there are no nodes.
    """

    kinds: tuple[NodeKind, ...]
    storage: float = math.inf
    slow_share: float = 0.0
    slow_speed: float = 1.0
    mtbf: float = math.inf
    repair_seconds: float = 3600.0

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ValueError("`kinds` is (), but must hold at least one NodeKind")
        for name in ("storage", "slow_speed", "mtbf"):
            check_number(name, getattr(self, name), above=0.0)
        for name in ("slow_share", "repair_seconds"):
            check_number(name, getattr(self, name))
        if self.slow_share > 1:
            raise ValueError(f"`slow_share` is {self.slow_share}, but must be <= 1")

    @property
    def gpus(self) -> int:
        """Workers on all nodes."""
        return sum(kind.nodes * kind.gpus for kind in self.kinds)

    @classmethod
    def uniform(cls, gpus: int, gpus_per_node: int = 4) -> Cluster:
        """Nodes of one kind; the last one may be smaller.

        >>> Cluster.uniform(10, 4).kinds
        (NodeKind(nodes=2, gpus=4, speed=1.0), NodeKind(nodes=1, gpus=2, speed=1.0))
        """
        check_int("gpus", gpus, at_least=1)
        check_int("gpus_per_node", gpus_per_node, at_least=1)
        whole, rest = divmod(gpus, gpus_per_node)
        full = (NodeKind(whole, gpus_per_node),) if whole else ()
        return cls((*full, NodeKind(1, rest)) if rest else full)


Allocation = Mapping[int, int]
"""Node -> workers on it."""


class Slots:
    """Free workers, node by node.

    A trial is put on nodes of one kind where they suffice, the fastest kind first; on the node that it fills best
    where it fits on one, else on the emptiest ones: few nodes make a short all-reduce.
    """

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        kinds = sorted(range(len(cluster.kinds)), key=lambda k: -cluster.kinds[k].speed)
        self._kind = [rank for rank, k in enumerate(kinds) for _ in range(cluster.kinds[k].nodes)]
        self._gpus = [cluster.kinds[kinds[rank]].gpus for rank in self._kind]
        self._speed = [cluster.kinds[kinds[rank]].speed for rank in self._kind]
        for node in rng.sample(range(len(self._kind)), round(cluster.slow_share * len(self._kind))):
            self._speed[node] *= cluster.slow_speed
        self._free = list(self._gpus)
        self._up = [True] * len(self._kind)
        self._capacity = sum(self._gpus)
        # Of each kind and number of free workers, the nodes: a dict is a set that remembers its order.
        self._shelves: list[list[dict[int, None]]] = [[{} for _ in range(max(self._gpus) + 1)] for _ in kinds]
        for node, rank in enumerate(self._kind):
            self._shelves[rank][self._free[node]][node] = None
        self._free_by_kind = [0] * len(kinds)
        for node, rank in enumerate(self._kind):
            self._free_by_kind[rank] += self._free[node]

    @property
    def nodes(self) -> int:
        """Nodes, up or down."""
        return len(self._kind)

    @property
    def free(self) -> int:
        """Workers that nobody holds, on nodes that are up."""
        return sum(self._free_by_kind)

    @property
    def up(self) -> int:
        """Workers on nodes that are up."""
        return self._capacity

    def take(self, workers: int) -> Allocation:
        """Puts workers on nodes; there must be as many free."""
        taken: dict[int, int] = {}
        enough = [rank for rank, free in enumerate(self._free_by_kind) if free >= workers]
        for rank in enough[:1] or range(len(self._free_by_kind)):
            while workers > sum(taken.values()) and self._free_by_kind[rank]:
                missing = workers - sum(taken.values())
                node = self._best(rank, missing)
                taken[node] = min(missing, self._free[node])
                self._move(node, -taken[node])
        return taken

    def give(self, allocation: Allocation) -> None:
        """Takes workers back; those on a node that is down wait for its repair."""
        for node, workers in allocation.items():
            self._move(node, workers)

    def spread(self, allocation: Allocation) -> Spread:
        """What the cost model needs to know of an allocation."""
        slowest = min(self._speed[node] for node in allocation)
        return Spread(sum(allocation.values()), len(allocation), slowest)

    def fail(self, node: int) -> None:
        """Takes a node out of service."""
        self._shelves[self._kind[node]][self._free[node]].pop(node)
        self._free_by_kind[self._kind[node]] -= self._free[node]
        self._up[node] = False
        self._capacity -= self._gpus[node]

    def repair(self, node: int) -> None:
        """Brings it back, with the workers that nobody holds."""
        self._up[node] = True
        self._capacity += self._gpus[node]
        self._shelves[self._kind[node]][self._free[node]][node] = None
        self._free_by_kind[self._kind[node]] += self._free[node]

    def _best(self, rank: int, missing: int) -> int:
        shelves = self._shelves[rank]
        fits = [shelf for shelf in shelves[missing:] if shelf]
        fullest = fits or [shelf for shelf in reversed(shelves[:missing]) if shelf]
        return next(iter(fullest[0]))

    def _move(self, node: int, workers: int) -> None:
        rank = self._kind[node]
        if self._up[node]:
            self._shelves[rank][self._free[node]].pop(node)
            self._free_by_kind[rank] += workers
        self._free[node] += workers
        if self._up[node]:
            self._shelves[rank][self._free[node]][node] = None
