"""The actors of a trial's ranks, without a cluster: where they are placed, what they are sent, how they end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from hydro_rasda.backends.ray.rank_actors import Ending, RankActors, blame

BUNDLES = [{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 3.0, "GPU": 1.0}, {"CPU": 4.0}]
"""One for each rank of a trial."""

NODES = {0: "near", 1: "near", 2: "far", 3: "far"}
"""The node of each bundle."""


class Actor:
    """The actor of one rank; its method notes its arguments, and is done when the test says so."""

    def __init__(self, options: dict[str, Any], place: Any) -> None:
        self.options, self.bundle, self.killed = options, place.placement_group_bundle_index, False
        assert place.placement_group == "the trial's"
        self.sent: Any = None
        self.ending: Ending | Exception | None = None
        self.run = SimpleNamespace(remote=self._run)

    def _run(self, *sent: Any) -> Actor:
        self.sent = sent
        return self


class Cluster:
    """The functions of Ray that start, ask and end actors."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.actors: list[Actor] = []
        self.stored: list[Any] = []
        self.waits: list[float] = []
        nodes = [{"NodeID": name, "NodeManagerHostname": f"host-{name}"} for name in NODES.values()]
        patch.setattr(ray, "remote", self._remote)
        patch.setattr(ray, "put", self._put)
        patch.setattr(ray, "wait", self._wait)
        patch.setattr(ray, "get", self._get)
        patch.setattr(ray, "kill", lambda actor: setattr(actor, "killed", True))
        patch.setattr(ray, "nodes", lambda: nodes)
        patch.setattr(ray.util, "get_current_placement_group", lambda: "the trial's")
        patch.setattr(ray.util, "placement_group_table", lambda group: {"bundles_to_node_id": NODES})

    def _remote(self, **options: Any) -> Any:
        def placed(scheduling_strategy: Any) -> Any:
            def start() -> Actor:
                self.actors.append(Actor(options, scheduling_strategy))
                return self.actors[-1]

            return SimpleNamespace(remote=start)

        return lambda cls: SimpleNamespace(options=placed)

    def _put(self, thing: Any) -> tuple[str, Any]:
        self.stored.append(thing)
        return "stored", thing

    def _wait(self, futures: list[Actor], num_returns: int, timeout: float) -> tuple[list[Actor], list[Actor]]:
        self.waits.append(timeout)
        assert num_returns == len(futures)
        return [of for of in futures if of.ending is not None], [of for of in futures if of.ending is None]

    def _get(self, future: Actor) -> Any:
        if isinstance(future.ending, Exception):
            raise future.ending
        return future.ending


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.fixture
def actors(cluster: Cluster, tmp_path: Path) -> Iterator[RankActors]:
    """The actors of a trial of four ranks, which goes on from a checkpoint."""
    (tmp_path / "worker.pt").write_bytes(b"weights")
    with contextlib.ExitStack() as stack:
        found = RankActors(BUNDLES, stack)
        found.start(("address", 7), "digest", "function", {"rank": 0, "checkpoint": str(tmp_path)})
        yield found


def test_each_bundle_but_the_first_has_an_actor_until_the_trial_ends(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        RankActors(BUNDLES, stack)
        assert [actor.bundle for actor in cluster.actors] == [1, 2, 3]
        resources = [(actor.options["num_cpus"], actor.options["num_gpus"]) for actor in cluster.actors]
        assert resources == [(2, 0), (3, 1), (4, 0)]
        assert not any(actor.killed for actor in cluster.actors)
    assert all(actor.killed for actor in cluster.actors)


def test_only_other_nodes_are_sent_the_function_and_the_checkpoint(
    cluster: Cluster, actors: RankActors, tmp_path: Path
) -> None:
    """On the node of rank 0, both are there already. For all other nodes, they are stored once."""
    near, *far = (actor.sent for actor in cluster.actors)
    told = {"store": ("address", 7)}
    assert near == ("digest", None, None, {"rank": 1, "checkpoint": str(tmp_path), **told})
    stored = ("stored", "function"), ("stored", b"weights")
    assert far == [("digest", *stored, {"rank": rank, "checkpoint": None, **told}) for rank in (2, 3)]
    assert cluster.stored == ["function", b"weights"]


def test_a_trial_that_begins_has_no_checkpoint_to_send(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        RankActors(BUNDLES, stack).start(("address", 7), "digest", "function", {"rank": 0, "checkpoint": None})
    assert cluster.stored == ["function", None]


def test_ranks_that_still_train_are_silent_and_have_not_failed(cluster: Cluster, actors: RankActors) -> None:
    silent: Ending = ("silent", "", "", None)
    done: Ending = ("done", "", "host-near", 11)
    cluster.actors[0].ending = done
    assert actors.endings(5.0) == {1: done, 2: silent, 3: silent}
    assert actors.failed() == {}
    assert cluster.waits == [5.0, 0], "to look for failures takes no time"


@pytest.mark.parametrize(
    ("ending", "found"),
    [
        (("error", "Traceback", "host-far", 12), ("error", "Traceback", "host-far", 12)),
        (ray.exceptions.RayActorError(error_msg="its node was lost"), ("died", "its node was lost", "", None)),
        (ray.exceptions.RayError("no such object"), ("error", "no such object", "", None)),
    ],
    ids=["raised", "died", "lost its data"],
)
def test_a_rank_that_ended_before_it_was_done_has_failed(
    cluster: Cluster, actors: RankActors, ending: Any, found: Ending
) -> None:
    cluster.actors[0].ending = ("done", "", "host-near", 11)
    cluster.actors[1].ending = ending
    assert actors.failed() == {2: found}


def test_ranks_that_have_not_started_have_no_endings(cluster: Cluster) -> None:
    with contextlib.ExitStack() as stack:
        found = RankActors(BUNDLES, stack)
        assert (found.endings(5.0), found.failed()) == ({}, {})


def test_a_rank_is_named_by_the_host_of_its_bundle(actors: RankActors, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [actors.host(rank) for rank in range(4)] == ["host-near", "host-near", "host-far", "host-far"]
    monkeypatch.setattr(ray, "nodes", list)
    assert actors.host(2) == "a lost node"


VAIN = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"
"""The error of a rank that waited for one that has ended."""


@pytest.mark.parametrize(
    ("kinds", "blamed"),
    [
        (["died", "error", "silent", "done"], 0),
        (["done", "silent", "error", "died"], 3),
        (["done", "silent", "error", "vain"], 2),
        (["vain", "done", "silent", "vain"], 2),
        (["vain", "vain", "done", "done"], 2),
        (["vain", "error", "error", "vain"], 1),
    ],
)
def test_the_rank_that_others_waited_for_is_blamed(kinds: list[str], blamed: int) -> None:
    endings: dict[int, Ending] = {
        rank: ("error", VAIN, "", None) if kind == "vain" else (kind, "the user's own mistake", "", None)
        for rank, kind in enumerate(kinds)
    }
    assert blame(endings) == blamed
