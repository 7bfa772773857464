"""Where workers sit."""

import math
import random
from statistics import fmean, stdev

import pytest

from hydro_rasda.simulator import Cluster, NodeKind, Spread
from hydro_rasda.simulator.cluster import Allocation, Slots


def slots(*kinds: NodeKind, **options: float) -> Slots:
    return Slots(Cluster(kinds, **options), random.Random(0))


def test_a_trial_takes_whole_nodes_and_fills_started_ones() -> None:
    four = slots(NodeKind(3, 4))
    assert sorted(four.take(8).values()) == [4, 4]
    one = four.take(1)
    assert four.take(3).keys() == one.keys()
    assert four.free == 0


def test_fast_nodes_first_and_no_mixture_where_it_can_be_avoided() -> None:
    mixed = slots(NodeKind(2, 4, speed=1.0), NodeKind(1, 4, speed=3.0))
    assert mixed.spread(mixed.take(3)) == Spread(3, 1, 3.0)
    assert mixed.spread(mixed.take(8)) == Spread(8, 2, 1.0)


def test_a_mixture_runs_at_its_slowest() -> None:
    mixed = slots(NodeKind(1, 4, speed=1.0), NodeKind(1, 4, speed=3.0))
    assert mixed.spread(mixed.take(6)) == Spread(6, 2, 1.0)


def test_slow_nodes_are_as_many_as_asked_for() -> None:
    half = slots(NodeKind(8, 1), slow_share=0.5, slow_speed=0.25)
    assert sorted(half.spread(half.take(1)).speed for _ in range(8)) == [0.25] * 4 + [1.0] * 4


def test_nodes_of_one_kind_differ_by_the_spread_of_their_speeds() -> None:
    many = slots(NodeKind(400, 1, speed=3.0), speed_spread=0.2)
    ratios = [math.log(many.spread(many.take(1)).speed / 3.0) for _ in range(400)]
    assert fmean(ratios) == pytest.approx(0.0, abs=0.03)
    assert stdev(ratios) == pytest.approx(0.2, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_workers_are_conserved(seed: int) -> None:
    """Whatever is taken, given back, broken and repaired: free, held and lost workers add up."""
    rng = random.Random(seed)
    pool = slots(NodeKind(5, 4), NodeKind(3, 8, speed=2.0))
    held: list[Allocation] = []
    down: set[int] = set()
    for _ in range(400):
        if held and rng.random() < 0.5:
            pool.give(held.pop(rng.randrange(len(held))))
        elif pool.free:
            workers = rng.randint(1, pool.free)
            held.append(pool.take(workers))
            assert sum(held[-1].values()) == workers
            assert not down & held[-1].keys()
        if rng.random() < 0.1:
            node = rng.randrange(pool.nodes)
            if node in down:
                down.remove(node)
                pool.repair(node)
            else:
                down.add(node)
                pool.fail(node)
                for allocation in [a for a in held if node in a]:
                    held.remove(allocation)
                    pool.give(allocation)
        assert pool.free + sum(sum(a.values()) for a in held) == pool.up
    for allocation in held:
        pool.give(allocation)
    for node in down:
        pool.repair(node)
    assert pool.free == pool.up == 5 * 4 + 3 * 8


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`kinds` is \(\), but must be one NodeKind or more"):
        Cluster(())
    with pytest.raises(ValueError, match=r"`gpus` is 0, but must be an integer from 1 to 1000000"):
        Cluster.uniform(0)
    with pytest.raises(ValueError, match=r"`speed` is 0, but must be a number > 0"):
        NodeKind(1, 1, speed=0)
    with pytest.raises(ValueError, match=r"`gpus` is 1000001, but must be at most 1000000"):
        Cluster((NodeKind(1000, 1000), NodeKind(1, 1)))
    for name in ("slow_share", "speed_spread"):
        with pytest.raises(ValueError, match=f"`{name}` is 1.5, but must be <= 1"):
            Cluster((NodeKind(1, 4),), **{name: 1.5})
    for name in ("slow_share", "repair_seconds", "speed_spread", "launch_seconds", "staged_bytes"):
        with pytest.raises(ValueError, match=f"`{name}` is inf, but must be finite"):
            Cluster((NodeKind(1, 4),), **{name: math.inf})
        with pytest.raises(ValueError, match=f"`{name}` is -1.0, but must be"):
            Cluster((NodeKind(1, 4),), **{name: -1.0})
    for name in ("storage", "slow_speed", "mtbf"):
        with pytest.raises(ValueError, match=f"`{name}` is 0.0, but must be a number > 0"):
            Cluster((NodeKind(1, 4),), **{name: 0.0})


def test_the_least_and_the_most_that_a_cluster_may_have() -> None:
    assert Cluster((NodeKind(1000, 1000),)).gpus == 1_000_000
    assert Cluster((NodeKind(1, 1),), slow_share=1.0, speed_spread=1.0, repair_seconds=0.0).gpus == 1
