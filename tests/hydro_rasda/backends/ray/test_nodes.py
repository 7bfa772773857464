"""Nodes that are stand-ins on this machine: ranks on two of them, of which one is lost."""

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray import tune
from ray.cluster_utils import Cluster

from hydro_rasda import RaceConfig, RASDAScheduler, RayBackend, Worker, elastic
from hydro_rasda.backends.ray import read_journal
from hydro_rasda.backends.ray.backend import RayDevices
from hydro_rasda.backends.ray.nodes import Slots
from hydro_rasda.contracts import Event
from hydro_rasda.heats.race import train_finalists
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.events import Callbacks, EpochEnded, MessageSaid
from tests.hydro_rasda.backends import finalists


def train(worker: Worker) -> None:
    """Adds 3 from each rank in every iteration, and takes its time where both nodes are held."""
    total = worker.checkpoint["total"] if worker.checkpoint is not None else 0.0
    while worker.iteration < 7:
        part = torch.tensor(worker.data)
        dist.all_reduce(part)
        total += part.item()
        time.sleep(2.0 if worker.world_size == 8 else 0.0)
        worker.report({"loss": 0.0, "total": total}, {"total": total})


# A node that is lost refuses the head's calls; after five, the head gives it up. By default it calls every 3 s.
HEAD = {"_system_config": {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}}


# Tune pickles its callbacks, and a cluster cannot be pickled.
LOSE: list[Callable[[], None]] = []


class LoseNode(tune.Callback):  # type: ignore[misc]
    """Takes a node away once the trial holds both."""

    def on_trial_result(self, iteration: int, trials: list, trial: object, result: dict, **info: object) -> None:
        if result["workers"] == 8 and LOSE:
            LOSE.pop()()


@pytest.mark.slow
def test_a_trial_spans_nodes_and_shrinks_to_those_that_are_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **HEAD})
    try:
        node = cluster.add_node(num_cpus=4)
        LOSE.append(lambda: cluster.remove_node(node, allow_graceful=False))
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        scheduler = RASDAScheduler(max_t=16, grace_period=1, workers=2, scaling_factor=2)
        with caplog.at_level(logging.WARNING, logger="hydro_rasda"):
            results = tune.Tuner(
                elastic(train, scheduler, data=3.0, timeout_s=20),
                tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler),
                run_config=tune.RunConfig(
                    storage_path=str(tmp_path),
                    name="run",
                    verbose=0,
                    failure_config=tune.FailureConfig(max_failures=3),
                    callbacks=[LoseNode()],
                ),
            ).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert results.num_errors == 0
    entries = {e.t: e for e in read_journal(results.experiment_path)}
    assert [entries[t].workers for t in (1, 2, 7)] == [2, 4, 4]
    assert 8 in [e.workers for e in read_journal(results.experiment_path)]
    assert "workers and gets 4: the cluster holds no more" in caplog.text
    metrics = results[0].metrics
    assert metrics is not None
    assert metrics["total"] == 3.0 * sum(entry.workers for entry in entries.values())


@pytest.mark.slow
def test_a_finalist_goes_on_on_the_nodes_that_are_left_and_on_those_that_come(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is lost when the trial is to get its workers; another one has come by the next milestone."""
    monkeypatch.setattr(Slots, "_fresh_for_s", -1.0)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **HEAD})
    nodes = [cluster.add_node(num_cpus=2)]

    def lose_and_add(event: Event) -> None:
        if isinstance(event, MessageSaid) and "goes on with 4 workers from epoch 3" in event.text and nodes:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        elif isinstance(event, EpochEnded) and event.epoch == 4:
            cluster.add_node(num_cpus=2)

    settings = {"max_t": 8, "race": RaceConfig(grace_period=1)}
    run = finalists.open_run(tmp_path / "run", problem, [{"lr": 0.01, "batch_size": 32}], **settings)
    run.callbacks = Callbacks([lose_and_add])
    try:
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        with run.store, RayBackend(resources_per_worker={"CPU": 1}).open(run) as devices:
            train_finalists(run, [0], devices)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert not run.history.failures
    assert [line["epoch"] for line in run.history.metrics["race", 0]] == list(range(1, 9))
    assert [line["workers"] for line in run.history.metrics["race", 0]] == [1, 2, 2, 2, 4, 4, 4, 4]


def test_a_node_that_does_not_answer_is_lost_before_ray_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a node die with it, and by default Ray gives the node up 15 s later."""
    devices: Any = SimpleNamespace(_devices={0: SimpleNamespace(node="a"), 1: SimpleNamespace(node="b")})
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        place = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": raylet.getsockname()[1]}
        nodes = [{"NodeID": name, "Alive": name == "a", **place} for name in ("a", "b")]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        assert [RayDevices._is_lost(devices, device) for device in (0, 1)] == [False, True]
    assert RayDevices._is_lost(devices, 0)


def test_a_worker_may_ask_for_a_node_by_its_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    """So scripts keep trials off the head, or on a node with data."""
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0, f"node:10.0.0.{n}": 1.0}} for n in range(3)]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert Slots({"CPU": 1, "node:10.0.0.1": 0.001}).count() == 4
    assert Slots({"CPU": 1}).count() == 12
    with pytest.raises(ValueError, match=r"the nodes have \[{'CPU': 4.0}, {'CPU': 4.0}, {'CPU': 4.0}\]"):
        Slots({"CPU": 1, "node:10.0.0.9": 0.001}).check(1)
