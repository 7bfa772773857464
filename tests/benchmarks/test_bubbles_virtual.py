from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.bubbles_virtual import DAY, Pipeline, harvest
from hydro_rasda.schedulers.bubble_policy import CONTROL


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [1, 4, 8, 28])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_share_of_bubbles_is_the_papers(p: int, m: int, schedule: Any) -> None:
    host = Pipeline(p, m, forward=1.0, backward=2.0, schedule=schedule)
    assert host.step() == pytest.approx(3 * (m + p - 1))
    assert host.bubble_share() == pytest.approx((p - 1) / (m + p - 1))
    for waits in host.waits():
        assert sum(waits) == pytest.approx(3 * (p - 1))  # on each rank alike


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 8, 3), (4, 4, 2), (4, 16, 4)])
def test_chunks_make_bubbles_smaller(p: int, m: int, v: int) -> None:
    host = Pipeline(p, m, forward=1.0, backward=2.0, schedule="interleaved", chunks=v)
    assert host.bubble_share() == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize("rank", range(4))
def test_the_order_is_torchs(rank: int) -> None:
    """Of a 1F1B rank as torch computes it, in the time that it takes."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    p, m, v = 4, 8, 2
    ahead = min(m * v, (v - 1) * p + 2 * (p - 1 - rank))
    forward = lambda step: (step // p) % v * p + rank  # noqa: E731
    backward = lambda step: (v - 1 - ((step - ahead) // p) % v) * p + rank  # noqa: E731
    rest = m * v - ahead
    operations = schedules._get_1f1b_rank_ops(v, p, ahead, rest, ahead, rank, forward, backward)
    order = [(op.computation_type.name == "FORWARD", op.stage_index, op.microbatch_index) for op in operations if op]
    host = Pipeline(p, m, 1.0, 2.0, "interleaved", v)
    assert order == host.order(rank)


def test_where_the_bubbles_of_1f1b_lie() -> None:
    """Two stages, by hand: the first waits for the second's first pass, the second for the first's first one."""
    host = Pipeline(2, 4, forward=1.0, backward=2.0, update=0.5)
    first, second = host.waits()
    assert first == pytest.approx([2.0, 1.0])  # F0 F1 [F0 B0] B0 F2 B1 F3 B2 [B3] B3
    assert second == pytest.approx([3.0])  # the end of a step and the beginning of the next in one
    assert host.step() == pytest.approx(3 * 5 + 0.5)


def test_what_a_sweep_makes_of_bubbles() -> None:
    host = Pipeline(2, 4, forward=0.1, backward=0.2)  # 0.3 of 1.5 seconds on each rank
    rate = 0.5 * (1 - 1 / CONTROL) * 0.2
    found = harvest(host, [(32, 1), (8, 2)], width=8, epoch_seconds=10.0, used=0.5)
    assert found.share == pytest.approx(0.5 * (1 - 1 / CONTROL))
    assert found.seconds == pytest.approx(2 * rate)
    assert found.epochs == pytest.approx(2 * rate * DAY / 10)
    # Two rounds of two groups; then one group of two epochs, on one rank.
    assert found.days * DAY == pytest.approx((2 * 10 + 20) / rate)
    twice = harvest(host, [(32, 1), (8, 2)], width=8, epoch_seconds=10.0, used=0.5, hosts=2)
    assert twice.days * DAY == pytest.approx((10 + 20) / rate)
    assert harvest(host, [(8, 1)], width=8, epoch_seconds=10.0, shortest=1.0).days == math.inf


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="`micro_batches`"):
        Pipeline(4, 6, 1.0, 2.0, "interleaved", 2)
    with pytest.raises(ValueError, match="`chunks`"):
        Pipeline(4, 6, 1.0, 2.0, "1f1b", 2)
    with pytest.raises(ValueError, match="`used`"):
        harvest(Pipeline(2, 2, 1.0, 2.0), [], width=1, epoch_seconds=1.0, used=0)
