"""The head node, persistent node speeds and staged data, by hand."""

from dataclasses import replace

import pytest

from hydro_rasda.simulator import Cluster, CostModel, Plan, Workload, random_search, simulate
from tests.hydro_rasda.simulator.test_engine import constant

TEN_SECONDS = CostModel(step_seconds=1.0, steps=10)


def ended(cluster: Cluster, workload: Workload, workers: int = 1, cost: CostModel = TEN_SECONDS) -> list[float]:
    outcome = simulate(Plan(random_search(1, workers)), workload, cluster, cost)
    return [trial.ended for trial in outcome.trials]


def test_the_head_node_starts_one_process_after_another() -> None:
    """Four trials of two workers each: the i-th begins once 2 i processes are there; then its own start."""
    cluster = replace(Cluster.uniform(8), launch_seconds=0.5)
    cost = replace(TEN_SECONDS, restart_seconds=3.0)
    four = constant(1, 2, 3, 4, epochs=1)
    assert ended(cluster, four, 2, cost) == pytest.approx([1 + 3 + 5, 2 + 3 + 5, 3 + 3 + 5, 4 + 3 + 5])


def test_a_restart_waits_for_the_head_node_and_says_so() -> None:
    cluster = replace(Cluster.uniform(2), launch_seconds=2.0)
    outcome = simulate(Plan(random_search(1)), constant(1, 2, epochs=1), cluster, TEN_SECONDS)
    assert [segment.restart for segment in outcome.segments] == [2.0, 4.0]


def test_no_first_step_before_all_nodes_have_their_data() -> None:
    """Three nodes copy 100 bytes each, at 10 bytes/s together: 30 s; the next trial on a node finds them there."""
    cluster = replace(Cluster.uniform(3, gpus_per_node=1), storage=10.0, staged_bytes=100.0)
    assert ended(cluster, constant(1, 2, 3, 4, epochs=1)) == pytest.approx([40, 40, 40, 50])


def test_a_node_keeps_its_speed_and_a_trial_runs_at_its_slowest_nodes() -> None:
    cluster = replace(Cluster.uniform(4, gpus_per_node=1), speed_spread=0.2)
    alone = ended(cluster, constant(*range(8), epochs=1))
    assert len({round(seconds, 6) for seconds in alone[:4]}) == 4
    together = ended(cluster, constant(1, epochs=1), workers=4)
    assert together[0] == pytest.approx(max(alone[:4]) / 4)


def test_bad_input() -> None:
    for argument, value in (("launch_seconds", -1.0), ("staged_bytes", float("inf")), ("speed_spread", 2.0)):
        with pytest.raises(ValueError, match=f"`{argument}` is {value}, but must be"):
            replace(Cluster.uniform(4), **{argument: value})  # type: ignore[arg-type]
