"""The ranks of a trial except rank 0. Each is controlled by a rank actor, which holds a bundle of the placement group.

This file is pickled by value; see `hydro_rasda.backends.ray.elastic_trainable` for the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hydro_rasda.backends.ray.fork_client import fork_rank, receive
from hydro_rasda.processes.hang_detector import waited_in_vain
from hydro_rasda.processes.temporary_folders import make_folder, owner

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules[owner.__module__])
cloudpickle.register_pickle_by_value(sys.modules[waited_in_vain.__module__])

_CHECKPOINT_FILE = "worker.pt"  # as in rank_worker.py, whose import would load torch

# The ending of a rank: kind, message, host and process id. The kind is "done", "died", "error" or "silent". For a rank
# that still runs, it may be the kind of its last message.
Ending = tuple[str, str, str, int | None]


class _RankActor:
    def run(self, digest: str, payload: Any, saved: bytes | None, job: dict[str, Any]) -> Ending:
        with contextlib.ExitStack() as stack:
            if saved is not None:
                folder = make_folder(owner(os.getpid()))
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                with open(os.path.join(folder, _CHECKPOINT_FILE), "wb") as file:
                    file.write(saved)
                job = {**job, "checkpoint": folder}
            rank = stack.enter_context(fork_rank(digest, payload, job))
            pid, kind, content = None, "", None
            while kind not in ("done", "died", "error"):
                kind, content = receive(rank)
                pid = content if kind == "hello" else pid
        return kind, content or "", socket.gethostname(), pid


class RankActors:
    """The rank actors of one trial, for all bundles except the first. They start at once, and end with `stack`."""

    def __init__(self, bundles: list[dict[str, float]], stack: contextlib.ExitStack) -> None:
        self._group = ray.util.get_current_placement_group()
        self._actors = [self._open(index, bundle) for index, bundle in enumerate(bundles) if index > 0]
        self._ranks: dict[Any, int] = {}
        for actor in self._actors:
            stack.callback(ray.kill, actor)

    def start(self, store: tuple[str, int], digest: str, payload: Any, job: dict[str, Any]) -> None:
        """Start ranks 1, 2, ..., which meet at the address `store`."""
        node_of = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        far = None
        for rank, actor in enumerate(self._actors, start=1):
            order = {**job, "rank": rank, "store": store}
            # Send neither payload nor checkpoint to rank 0's node: the fork server has the payload, and the folder is
            # there.
            if node_of[rank] == node_of[0]:
                future = actor.run.remote(digest, None, None, order)
            else:
                far = far or (ray.put(payload), ray.put(_saved_bytes(job["checkpoint"])))
                future = actor.run.remote(digest, *far, {**order, "checkpoint": None})
            self._ranks[future] = rank

    def failed(self) -> dict[int, Ending]:
        """Return the endings of ranks that ended before they were done."""
        return {rank: ending for rank, ending in self.endings(0).items() if ending[0] not in ("done", "silent")}

    def endings(self, timeout: float) -> dict[int, Ending]:
        """Return how each rank ended. Ranks that do not end within `timeout` seconds are "silent"."""
        if not self._ranks:
            return {}
        ready, _ = ray.wait(list(self._ranks), num_returns=len(self._ranks), timeout=timeout)
        silent: Ending = ("silent", "", "", None)
        return {rank: _ending(future) if future in ready else silent for future, rank in self._ranks.items()}

    def host(self, rank: int) -> str:
        """Return the name of the node that holds a rank's bundle; "a lost node" if Ray does not know it."""
        node_id = ray.util.placement_group_table(self._group)["bundles_to_node_id"].get(rank)
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        return str(names.get(node_id, "a lost node"))

    def _open(self, index: int, bundle: dict[str, float]) -> Any:
        actor = ray.remote(**actor_options(bundle))(_RankActor)
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return actor.options(scheduling_strategy=place).remote()


def actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Return a bundle's resources as arguments for a new Ray actor. CPUs, GPUs and memory have their own arguments."""
    named = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
    if "memory" in bundle:
        named["memory"] = bundle["memory"]
    # Leave out memory of the object store, because only placement groups can reserve it.
    own = ("CPU", "GPU", "memory", "object_store_memory")
    return {**named, "resources": {name: amount for name, amount in bundle.items() if name not in own}}


def blame(endings: dict[int, Ending]) -> int:
    """Return the rank to blame: one that died, else one that raised, else one that is silent.

    If there is no such rank, blame one that returned while others waited for it. Ranks that raised only because they
    waited in vain come last.
    """
    order = {"died": 0, "error": 1, "silent": 2, "done": 3}

    def key(rank: int) -> tuple[int, int]:
        kind, message, _, _ = endings[rank]
        return (4 if kind == "error" and waited_in_vain(message) else order.get(kind, 5), rank)

    return min(endings, key=key)


def _ending(future: Any) -> Ending:
    try:
        ending: Ending = ray.get(future)
    except ray.exceptions.RayActorError as error:
        return "died", str(error), "", None
    except ray.exceptions.RayError as error:
        return "error", str(error), "", None
    return ending


def _saved_bytes(folder: str | None) -> bytes | None:
    if folder is None:
        return None
    with open(os.path.join(folder, _CHECKPOINT_FILE), "rb") as file:
        return file.read()
