"""Two nodes of four logical CPUs each, on this machine: ranks on both, and one node lost."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist
from ray import tune
from ray.cluster_utils import Cluster

from hydro_rasda import RASDAScheduler, Worker, elastic, read_journal


def train(worker: Worker) -> None:
    """Adds 3 from each rank in every iteration, and takes its time where both nodes are held."""
    total = worker.checkpoint["total"] if worker.checkpoint is not None else 0.0
    while worker.iteration < 7:
        part = torch.tensor(worker.data)
        dist.all_reduce(part)
        total += part.item()
        time.sleep(2.0 if worker.world_size == 8 else 0.0)
        worker.report({"loss": 0.0, "total": total}, {"total": total})


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
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
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
