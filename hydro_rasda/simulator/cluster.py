"""The nodes of a cluster, the trials' workers on them, and the progress of each trial."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from hydro_rasda.common.argument_checks import check_int, check_is, check_number, require
from hydro_rasda.simulator.training_time import CostModel, Spread

MOST_GPUS = 1_000_000
"""Most GPUs of a cluster. The state of more GPUs would not fit into memory."""


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one kind.

    Attributes:
        gpus: GPUs of each node. A worker is one GPU.
        speed: Speed of a worker, relative to the device of the cost model's step time.
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
    """The simulated cluster.

    Attributes:
        storage: Bytes per second that the shared file system delivers. They are split evenly between the running
            trials.
        slow_share: Share of the nodes that run at `slow_speed`; the seed chooses them at random.
        slow_speed: Speed of slow nodes, relative to other nodes of their kind.
        speed_spread: Standard deviation of the logarithm of a node's speed, which the seed draws once. A trial runs at
            the speed of its slowest node.
        launch_seconds: Time that the head node takes to start one worker. It starts all workers one after another.
        staged_bytes: Bytes that each node copies from `storage` before its first step. All nodes copy at the same time,
            and keep the copy.
        mtbf: Mean seconds between two failures of a node, exponentially distributed; inf for no failures.
        repair_seconds: Time from a node's failure until it is back.

    Raises:
        ValueError: if an argument is not a number or out of range, or if there are no nodes.
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
        """Number of workers on all nodes."""
        return sum(kind.nodes * kind.gpus for kind in self.kinds)

    @classmethod
    def uniform(cls, gpus: int, gpus_per_node: int = 4) -> Cluster:
        """Return a cluster of equal nodes. The last node may have fewer GPUs.

        >>> Cluster.uniform(10, 4).kinds
        (NodeKind(nodes=2, gpus=4, speed=1.0), NodeKind(nodes=1, gpus=2, speed=1.0))
        """
        check_int("gpus", gpus, at_least=1, at_most=MOST_GPUS)
        check_int("gpus_per_node", gpus_per_node, at_least=1)
        whole, rest = divmod(gpus, gpus_per_node)
        full = (NodeKind(whole, gpus_per_node),) if whole else ()
        return cls((*full, NodeKind(1, rest)) if rest else full)


Allocation = Mapping[int, int]
"""The workers of one trial: maps a node to the number of the trial's workers there."""


class Slots:
    """The free workers of each node.

    A trial is put on nodes of one kind if these have enough free workers; the fastest kind comes first. If the trial
    fits on one node, it gets the fitting node with the fewest free workers. Otherwise it gets the nodes with the most
    free workers, because an all-reduce over few nodes is fast.
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
        # `_shelves[kind][free]` has the nodes of a kind that have `free` free workers. The dicts serve as ordered sets.
        self._shelves: list[list[dict[int, None]]] = [[{} for _ in range(max(self._gpus) + 1)] for _ in kinds]
        self._free_by_kind = [0] * len(kinds)
        for node in range(len(self._kind)):
            self.repair(node)

    @property
    def nodes(self) -> int:
        """Number of nodes, up or down."""
        return len(self._kind)

    @property
    def free(self) -> int:
        """Number of workers that no trial has, on nodes that are up."""
        return sum(self._free_by_kind)

    @property
    def up(self) -> int:
        """Number of workers on nodes that are up."""
        return self._capacity

    def take(self, workers: int) -> Allocation:
        """Allocate workers to a trial; at least this number must be free."""
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
        """Give back a trial's workers. Workers on a node that is down become free once the node is repaired."""
        for node, workers in allocation.items():
            self._move(node, workers)

    def spread(self, allocation: Allocation) -> Spread:
        """Return what the cost model needs of an allocation: its workers, its nodes, and the slowest node's speed."""
        slowest = min(map(self._speed.__getitem__, allocation))
        return Spread(sum(allocation.values()), len(allocation), slowest)

    def fail(self, node: int) -> None:
        """Take a node out of service."""
        self._shelves[self._kind[node]][self._free[node]].pop(node)
        self._free_by_kind[self._kind[node]] -= self._free[node]
        self._up[node] = False
        self._capacity -= self._gpus[node]

    def repair(self, node: int) -> None:
        """Bring a node back into service. Its workers are free, except those that trials still hold."""
        self._up[node] = True
        self._capacity += self._gpus[node]
        self._shelves[self._kind[node]][self._free[node]][node] = None
        self._free_by_kind[self._kind[node]] += self._free[node]

    def _take_whole(self, rank: int, missing: int, taken: dict[int, int]) -> int:
        """Take all free workers of one node after another, until the next node has more than are missing.

        The nodes are of the kind `rank`, 0 for the fastest. Nodes with most free workers come first. `taken` gets the
        workers of each node. Return the number of workers taken.
        """
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
        """Return, of the nodes of kind `rank` with at least `missing` free workers, one with the fewest."""
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
    """The time before a trial's first step, in which the head node starts processes and each node copies the data.

    The head node starts one process after another. All nodes begin to copy when the search begins, and share the
    storage, so that they end at the same time.
    """

    def __init__(self, cluster: Cluster, cost: CostModel) -> None:
        self._each, self._restart = cluster.launch_seconds, cost.restart_seconds
        self._free_at = 0.0
        nodes = sum(kind.nodes for kind in cluster.kinds)
        self._staged_at = nodes * cluster.staged_bytes / cluster.storage

    def first_step(self, workers: int, now: float) -> float:
        """Return the time at which a trial that gets workers now begins its first step.

        Until its processes have started, the head node starts no others.
        """
        self._free_at = max(now, self._free_at) + workers * self._each
        return max(self._free_at + self._restart, self._staged_at)


@dataclass(slots=True)
class SimulatedTrial:
    """A trial: its progress, its workers, and the time that its present epoch takes."""

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
