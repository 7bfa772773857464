"""The nodes of a cluster, which of them are up, which trial has which workers on them, and how far each trial came."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from hydro_rasda.common.argument_checks import check_int, check_is, check_number, require
from hydro_rasda.simulator.training_time import CostModel, Spread

MOST_GPUS = 1_000_000
"""Of a cluster: more would not fit memory."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one kind.

    Attributes:
        gpus: GPUs of each node. A worker is one GPU.
        speed: Of a worker, relative to the device that the cost model's step time was measured on.
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
    """The machine that is simulated.

    Attributes:
        storage: Bytes per second that the shared file system delivers, at any time split evenly between the trials that
            run.
        slow_share: Share of the nodes, chosen at random by the seed, that run at `slow_speed`.
        slow_speed: Speed of these nodes, relative to the others of their kind.
        speed_spread: Standard deviation of the logarithm of a node's speed, which the seed draws once. A trial runs at
            the speed of its slowest node.
        launch_seconds: That the head node takes to start one worker, one after another, of whichever trial.
        staged_bytes: Bytes that each node copies from `storage` before its first step; all nodes copy at once, and keep
            the copy.
        mtbf: Mean time in seconds between two failures of a node, exponentially distributed; inf for no failures.
        repair_seconds: Time from a node's failure until it is back.

    Raises:
        ValueError: if one is no number or out of range, or there are no nodes.
    """

    kinds: tuple[NodeKind, ...]
    storage: float = math.inf
    slow_share: float = 0.0
    slow_speed: float = 1.0
    speed_spread: float = 0.0
    launch_seconds: float = 0.0
    staged_bytes: float = 0.0
    mtbf: float = math.inf
    repair_seconds: float = 3600.0

    def __post_init__(self) -> None:
        check_is("kinds", self.kinds, NodeKind, several=True)
        require(bool(self.kinds), "kinds", self.kinds, "one NodeKind or more")
        require(self.gpus <= MOST_GPUS, "gpus", self.gpus, f"at most {MOST_GPUS}")
        for name in ("storage", "slow_speed", "mtbf"):
            check_number(name, getattr(self, name), above=0.0)
        for name in ("slow_share", "repair_seconds", "speed_spread", "launch_seconds", "staged_bytes"):
            check_number(name, getattr(self, name))
            require(math.isfinite(getattr(self, name)), name, getattr(self, name), "finite")
        require(self.slow_share <= 1, "slow_share", self.slow_share, "<= 1")
        require(self.speed_spread <= 1, "speed_spread", self.speed_spread, "<= 1")

    @property
    def gpus(self) -> int:
        """Workers on all nodes."""
        return sum(kind.nodes * kind.gpus for kind in self.kinds)

    @classmethod
    def uniform(cls, gpus: int, gpus_per_node: int = 4) -> Cluster:
        """A cluster of equal nodes, of which the last one may have fewer GPUs.

        Args:
            gpus: GPUs of all nodes together.
            gpus_per_node: GPUs of each node but the last.

        >>> Cluster.uniform(10, 4).kinds
        (NodeKind(nodes=2, gpus=4, speed=1.0), NodeKind(nodes=1, gpus=2, speed=1.0))
        """
        check_int("gpus", gpus, at_least=1, at_most=MOST_GPUS)
        check_int("gpus_per_node", gpus_per_node, at_least=1)
        whole, rest = divmod(gpus, gpus_per_node)
        full = (NodeKind(whole, gpus_per_node),) if whole else ()
        return cls((*full, NodeKind(1, rest)) if rest else full)


Allocation = Mapping[int, int]
"""The workers of one trial: by node, how many of them are on it."""


class Slots:
    """The free workers of each node.

    A trial is put on nodes of one kind where these have enough free workers, the fastest kind first. If it fits on
    one node, it gets the one that it fills best, otherwise those with the most free workers: an all-reduce over few
    nodes is fast.
    """

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        kinds = sorted(range(len(cluster.kinds)), key=lambda k: -cluster.kinds[k].speed)
        self._kind = [rank for rank, k in enumerate(kinds) for _ in range(cluster.kinds[k].nodes)]
        self._gpus = [cluster.kinds[kinds[rank]].gpus for rank in self._kind]
        self._speed = [cluster.kinds[kinds[rank]].speed for rank in self._kind]
        for node in rng.sample(range(len(self._kind)), round(cluster.slow_share * len(self._kind))):
            self._speed[node] *= cluster.slow_speed
        if cluster.speed_spread:
            self._speed = [speed * rng.lognormvariate(0.0, cluster.speed_spread) for speed in self._speed]
        self._free = list(self._gpus)
        self._up = [False] * len(self._kind)
        self._capacity = 0
        # Of each kind and number of free workers, the nodes: a dict is a set that remembers its order.
        self._shelves: list[list[dict[int, None]]] = [[{} for _ in range(max(self._gpus) + 1)] for _ in kinds]
        self._free_by_kind = [0] * len(kinds)
        for node in range(len(self._kind)):
            self.repair(node)

    @property
    def nodes(self) -> int:
        """Nodes, up or down."""
        return len(self._kind)

    @property
    def free(self) -> int:
        """Workers that no trial has, on nodes that are up."""
        return sum(self._free_by_kind)

    @property
    def up(self) -> int:
        """Workers on nodes that are up."""
        return self._capacity

    def take(self, workers: int) -> Allocation:
        """Gives a trial its workers; at least so many must be free."""
        taken: dict[int, int] = {}
        missing = workers
        enough = [rank for rank, free in enumerate(self._free_by_kind) if free >= workers]
        for rank in enough[:1] or range(len(self._free_by_kind)):
            missing -= self._take_whole(rank, missing, taken)
            if missing and self._free_by_kind[rank]:
                node = self._best(rank, missing)
                taken[node] = missing
                self._move(node, -missing)
                missing = 0
        return taken

    def give(self, allocation: Allocation) -> None:
        """Takes workers back. Those on a node that is down are free once it is repaired."""
        for node, workers in allocation.items():
            self._move(node, workers)

    def spread(self, allocation: Allocation) -> Spread:
        """An allocation as the cost model sees it."""
        slowest = min(map(self._speed.__getitem__, allocation))
        return Spread(sum(allocation.values()), len(allocation), slowest)

    def fail(self, node: int) -> None:
        """Takes a node out of service."""
        self._shelves[self._kind[node]][self._free[node]].pop(node)
        self._free_by_kind[self._kind[node]] -= self._free[node]
        self._up[node] = False
        self._capacity -= self._gpus[node]

    def repair(self, node: int) -> None:
        """Brings a node back into service; the workers that no trial has are free again."""
        self._up[node] = True
        self._capacity += self._gpus[node]
        self._shelves[self._kind[node]][self._free[node]][node] = None
        self._free_by_kind[self._kind[node]] += self._free[node]

    def _take_whole(self, rank: int, missing: int, taken: dict[int, int]) -> int:
        """Takes all that nodes have free, the most first, while no node has more than is missing; how many that is."""
        shelves, found = self._shelves[rank], 0
        for free in range(len(shelves) - 1, 0, -1):
            nodes = list(islice(shelves[free], (missing - found) // free))
            for node in nodes:
                del shelves[free][node]
                shelves[0][node] = None
                self._free[node] = 0
                taken[node] = free
            found += free * len(nodes)
            if shelves[free]:
                break
        self._free_by_kind[rank] -= found
        return found

    def _best(self, rank: int, missing: int) -> int:
        """Of the nodes that have enough free workers, the first of those that have the fewest."""
        return next(iter(next(filter(None, self._shelves[rank][missing:]))))

    def _move(self, node: int, workers: int) -> None:
        before = self._free[node]
        self._free[node] = after = before + workers
        if self._up[node]:
            rank = self._kind[node]
            shelves = self._shelves[rank]
            del shelves[before][node]
            shelves[after][node] = None
            self._free_by_kind[rank] += workers


class Launching:
    """The time before a trial's first step: the head node starts processes one by one, each node copies the data.

    The nodes copy when the search begins, all at once and from the same storage, and so are done together.
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


@dataclass(slots=True)
class SimulatedTrial:
    """A trial: how far it came, the workers that it has, and what its present epoch takes."""

    name: str
    scores: list[float]
    work: float
    workers: int
    epoch: int = 0
    saved: int = 0
    rung: int = 0
    segment: int = 0
    allocation: Allocation = field(default_factory=dict)
    spread: Spread = field(default_factory=lambda: Spread(1))
    training: float = 0.0
    since: float = 0.0
    started: float = 0.0
    first_step: float = 0.0
    ended: float = 0.0
    began: float = 0.0
    noise: float = 1.0
    epoch_seconds: float = 0.0
    own_seconds: dict[int, float] = field(default_factory=dict)
    waited: float = 0.0
    restarts: int = 0
    lost_epochs: int = 0
