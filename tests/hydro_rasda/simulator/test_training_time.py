"""Costs in closed form."""

import math
import random
from statistics import mean

import pytest

from hydro_rasda.simulator import CostModel, Link, Spread, all_reduce, hierarchical_all_reduce
from hydro_rasda.simulator.training_time import slowest


@pytest.mark.parametrize("members", [1, 2, 3, 8])
def test_all_reduce_is_the_sum_of_its_messages(members: int) -> None:
    """A ring sends n - 1 chunks of 1/n to reduce, and as many to gather, each with one latency."""
    link = Link(bandwidth=10.0, latency=0.5)
    message = 120.0 / members / link.bandwidth + link.latency
    assert all_reduce(120.0, members, link) == pytest.approx(2 * (members - 1) * message)


def test_all_reduce_over_nodes_is_two_rings() -> None:
    intra, inter = Link(100.0, 0.01), Link(10.0, 0.1)
    assert hierarchical_all_reduce(50.0, 4, 1, intra, inter) == all_reduce(50.0, 4, intra)
    both = all_reduce(50.0, 4, intra) + all_reduce(50.0, 3, inter)
    assert hierarchical_all_reduce(50.0, 12, 3, intra, inter) == pytest.approx(both)


def test_epoch_is_compute_and_reduction_and_what_does_not_scale() -> None:
    cost = CostModel(step_seconds=0.5, steps=80, serial_seconds=7.0, gradient_bytes=40.0, inter=Link(100.0))
    reduction = 2 * (2 - 1) / 2 * 40.0 / 100.0
    assert cost.epoch(Spread(1)) == 80 * 0.5 + 7.0
    assert cost.epoch(Spread(8, nodes=2)) == pytest.approx(10 * (0.5 + reduction) + 7.0)
    assert cost.epoch(Spread(8, nodes=2, speed=2.0), work=3.0) == pytest.approx(10 * (0.25 + reduction) * 3.0 + 7.0)


def test_overlap_hides_the_reduction_up_to_its_share() -> None:
    cost = CostModel(step_seconds=1.0, steps=10, gradient_bytes=100.0, inter=Link(100.0), overlap=0.75)
    assert cost.step(Spread(2, nodes=2)) == pytest.approx(1.0 + (1.0 - 0.75))
    assert cost.step(Spread(2, nodes=1)) == 1.0


def test_reading_takes_over_where_storage_is_slower() -> None:
    cost = CostModel(step_seconds=1.0, steps=10, dataset_bytes=600.0)
    assert cost.epoch(Spread(1), storage=100.0) == 10.0
    assert cost.epoch(Spread(5), storage=100.0) == 6.0
    assert cost.epoch(Spread(5)) == 2.0


def test_efficiency_of_amdahl() -> None:
    cost = CostModel(step_seconds=1.0, steps=90, serial_seconds=10.0)
    assert cost.efficiency(Spread(1)) == 1.0
    assert cost.efficiency(Spread(9)) == pytest.approx(100 / (9 * 20))


@pytest.mark.parametrize("workers", [2, 16, 64])
def test_slowest_is_the_expected_maximum(workers: int) -> None:
    rng = random.Random(0)
    drawn = mean(max(rng.gauss(1.0, 0.1) for _ in range(workers)) for _ in range(4000))
    assert slowest(workers, 0.1) == pytest.approx(drawn, abs=0.004)


def test_a_batch_of_the_size_of_the_noise_scale_takes_twice_the_examples_of_tiny_ones() -> None:
    cost = CostModel(step_seconds=1.0, steps=10, noise_scale=1e6)
    assert cost.passes(10**6) == pytest.approx(2.0, rel=1e-5)
    assert [CostModel(step_seconds=1.0, steps=10).passes(n) for n in (1, 64)] == [1.0, 1.0]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`noise_scale` is 0, but must be a number > 0"):
        CostModel(step_seconds=1.0, steps=1, noise_scale=0)
    with pytest.raises(ValueError, match=r"`steps` is 0, but must be a number > 0"):
        CostModel(step_seconds=1.0, steps=0)
    with pytest.raises(ValueError, match=r"`jitter` is -0.1, but must be a number >= 0"):
        CostModel(step_seconds=1.0, steps=1, jitter=-0.1)
    with pytest.raises(ValueError, match=r"`dataset_bytes` is inf, but must be finite"):
        CostModel(step_seconds=1.0, steps=1, dataset_bytes=math.inf)
    with pytest.raises(ValueError, match=r"`bandwidth` is 0.0, but must be a number > 0"):
        Link(0.0)
    with pytest.raises(ValueError, match=r"`latency` is nan, but must be a number >= 0"):
        Link(1.0, math.nan)
    with pytest.raises(ValueError, match=r"`steps` is '9', but must be a number > 0"):
        CostModel(step_seconds=1.0, steps="9")  # type: ignore[arg-type]
